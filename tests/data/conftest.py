import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedDatasetWriter


@pytest.fixture
def write_dataset(tmp_path):
    """Writes documents (lists of ids) to tmp_path/<name> and returns the prefix."""

    def write(documents, name="corpus", dtype=np.uint16):
        with IndexedDatasetWriter(tmp_path / name, dtype) as writer:
            for document in documents:
                writer.add_document(document)
        return str(tmp_path / name)

    return write


@pytest.fixture
def documents():
    """23 documents of 0 to 40 ids; every token is unique, so that a sample tells where its tokens come from."""
    lengths = np.random.RandomState(3).randint(0, 41, 23)
    lengths[[0, 7, 8, 22]] = 0
    tokens = np.arange(1, lengths.sum() + 1)
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]
