"""Small studies for tests."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ntp.planner.policies import Setting, prepare
from ntp.planner.study import Policy, Study, load_study

ROOT = Path(__file__).parent.parent
PAPER = ROOT / "configs" / "cluster-paper-32k.yaml"

MODEL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "head_dim": 16,
    "vocab_size": 512,
    "ffn_unit": 16,
    "vocab_unit": 16,
}


def tree(**sections: Any) -> dict[str, Any]:
    """A study of 4 replicas x 2 stages x TP4 in domains of 8 as plain values; keywords replace sections."""
    base: dict[str, Any] = {
        "cluster": {"gpus": 32, "domain_size": 8},
        "job": {
            "dp": 4,
            "tp": 4,
            "pp": 2,
            "batch_rule": "shrink",
            "batch": {"seq_len": 64, "global_batch": 32},
            "model": MODEL,
        },
        "failures": {"kinds": [{"name": "any", "per_gpu_hour": 1e-3, "repair_hours": [24, 48]}]},
        "step": {"times": "proportional"},
        "policies": [{"name": "drop", "degrees": "whole"}],
        "sweep": None,
        "simulation": {"days": 10, "seeds": 2},
    }
    return {**base, **sections}


def job(**fields: Any) -> dict[str, Any]:
    """The job of `tree` with other fields."""
    return {**tree()["job"], **fields}


def write(path: Path, **sections: Any) -> Path:
    """`tree` as a file."""
    path.write_text(yaml.safe_dump(tree(**sections), sort_keys=False))
    return path


def setting(tmp_path: Path, **sections: Any) -> Setting:
    """A checked study, prepared."""
    return prepare(load_study(write(tmp_path / "study.yaml", **sections)))


def study_of(**sections: Any) -> Study:
    """A study without the checks of a file."""
    return Study.model_validate(tree(**sections), strict=False)


def policy(**fields: Any) -> Policy:
    return Policy.model_validate({"name": "p", "degrees": "free", **fields}, strict=False)


def row(*failed: int) -> "np.ndarray":
    """One moment."""
    return np.array([failed], np.int16)
