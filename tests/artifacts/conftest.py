"""A store in a folder whose name has a space and letters outside ASCII, and small states."""

import numpy as np
import pytest

from artifacts import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "ein Läger 倉庫")


@pytest.fixture
def tensors():
    random = np.random.default_rng(7)
    return {
        "weights/wte": random.standard_normal((40, 8)).astype(np.float32),
        "weights/ln_f.bias": np.zeros(8, np.float32),
        "m/wte": random.standard_normal((40, 8)).astype(np.float32),
        "v/wte": np.zeros((40, 8), np.float32),
        "history/loss": np.empty(0, np.float32),
        "history/digest": np.arange(64, dtype=np.uint8).reshape(2, 32),
        "step": np.array(2, np.int64),
    }
