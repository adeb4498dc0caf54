"""The prover of Programs."""

from outsize.schedule.proof.prove import Proof, prove

__all__ = ["Proof", "prove"]
