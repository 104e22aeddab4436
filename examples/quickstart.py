"""The Python client, cell by cell: submit, watch, cancel, resume, read the curve, download.

It needs a running distill-server, at HOST:PORT or localhost:50051, and a job file:

python -m examples.quickstart JOB.toml [HOST:PORT]
"""

# %% Connect to the server.
import sys

from clients import DistillClient, DistillError, JobState, load_job, points_of

job_file = sys.argv[1] if len(sys.argv) > 1 else "add.toml"
server = sys.argv[2] if len(sys.argv) > 2 else "localhost:50051"
client = DistillClient(server)

# %% Check the job file: the error lists all problems at once. Here an unknown key is set.
try:
    load_job(job_file, ["teacher.topk=8"])
except DistillError as error:
    print(error)

# %% Submit the job. With the same idempotency key, running this cell again returns the same job.
config = load_job(job_file).config
job = client.submit(config, idempotency_key=f"quickstart {job_file}")
print(job.id, job.state)

# %% Watch the first ten steps. The client reconnects if the server restarts.
for event in job.watch():
    if event.metrics:
        print(event.step, {name: round(value, 4) for name, value in event.metrics.items()})
    if event.step >= 10:
        break

# %% Cancel the job: it writes a checkpoint first. Then resume it from there; the curve continues.
job.cancel()
job = job.wait(timeout=120)
print(job.state, "at step", job.step)
if job.state is JobState.CANCELLED:
    job = job.resume().wait(timeout=3600)
print(job.state, "at step", job.step)

# %% Read the whole curve. For pandas: DataFrame([{"step": p.step, **p.metrics} for p in points]).
points = points_of(job.history())
held_out = [(p.step, round(p.metrics["eval/kl"], 3)) for p in points if "eval/kl" in p.metrics]
print("held-out KL:", held_out)

# %% Download the model, a Hugging Face directory. Raises WrongState, with the reason, if it failed.
path = job.pull(f"{job.id}-model")
print(path)
client.close()
