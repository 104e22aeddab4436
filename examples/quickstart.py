"""A job from Python, cell by cell: submit, watch, stop, go on, look at the curve, take the model.

python -m examples.quickstart JOB.toml [HOST:PORT]
"""

# %% What to talk to, and what to train: a job file, as the command takes it.
import sys

from clients.config.file import load_job
from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from clients.jobs.record import points_of
from protos.errors import DistillError

job_file = sys.argv[1] if len(sys.argv) > 1 else "add.toml"
server = sys.argv[2] if len(sys.argv) > 2 else "localhost:50051"
client = DistillClient(server)

# %% Every mistake of the file is told at once, before anything starts.
try:
    load_job(job_file, ["teacher.topk=8"])
except DistillError as error:
    print(error)

# %% The key makes a second run of this cell the same job, not a second one.
config = load_job(job_file).config
job = client.submit(config, idempotency_key=f"quickstart {job_file}")
print(job.id, job.state)

# %% The events of a job, live; a server that is restarted is waited for. Here: ten steps of it.
for event in client.watch(job.id):
    if event.metrics:
        print(event.step, {name: round(value, 4) for name, value in event.metrics.items()})
    if event.step >= 10:
        break

# %% Stop it after a checkpoint; then go on where it stopped. Weights and curve continue.
client.cancel(job.id)
job = client.wait(job.id, timeout=120)
print(job.state, "at step", job.step)
if job.state is JobState.CANCELLED:
    client.resume(job.id)
    job = client.wait(job.id, timeout=3600)
print(job.state, "at step", job.step)

# %% The whole curve: a pandas.DataFrame([{"step": p.step, **p.metrics} for p in points]), say.
points = points_of(client.history(job.id))
held_out = [(p.step, round(p.metrics["eval/kl"], 3)) for p in points if "eval/kl" in p.metrics]
print("held-out KL:", held_out)

# %% The model: a Hugging Face directory. Raises with the job's reason if it failed.
path = client.pull(job.id, f"{job.id}-model")
print(path)
client.close()
