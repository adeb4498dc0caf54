"""The prover of Programs."""

from outsize.schedule.proof.prove import Proof, prove
