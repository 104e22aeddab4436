"""Linear modules that a process gathers as one: those called in every forward pass."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from student_trainer.model.probes import called_linear_modules
from student_trainer.model.student import Student
from tests.student_trainer import tiny


class Mixer(nn.Module):
    """As in hybrid models, one weight is read without a call, and experts get only some tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_only, self.called_module, self.expert_module = (
            nn.Linear(4, 4) for _ in range(3)
        )

    def forward(self, states: Tensor) -> Tensor:
        mixed: Tensor = self.expert_module(
            self.called_module(functional.linear(states, self.weight_only.weight))
        )
        return mixed


def test_modules_that_are_read_or_are_experts_are_not_called() -> None:
    mixer = Mixer()
    with called_linear_modules(mixer) as called_modules:
        mixer(mixer.weight_only.weight)
    assert called_modules == {mixer.called_module}
    mixer(mixer.weight_only.weight)
    assert called_modules == {mixer.called_module}, "the hooks are gone"


def test_all_linear_modules_of_a_dense_model_are_called() -> None:
    model = tiny.model(layers=2)
    assert len(Student(model).linear & set(model.model.modules())) == 2 * 7
