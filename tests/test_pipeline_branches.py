"""Only the engine may decide anything by how many pipeline stages there are: everybody else has one path."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENTRY_POINTS = ("train.py", "deepy.py", "generate.py")
# The executors; arguments, which refuse what does not go together; and grids that know which ranks they have.
MAY_ASK = ("megatron/engine/", "megatron/neox_arguments/", "megatron/mpu/grid.py", "megatron/checkpointing/holding.py")
NUMBERS_OF_STAGES = ("pipe_parallel_size", "is_pipe_parallel", "num_stages", "pp")
ENGINES = ("OneStage", "PipelineStage", "StageEngine", "ShellEngine", "TrainingEngine")


def questions(source: str) -> list[int]:
    """Lines of `source` on which something is decided by a number of stages, or by what kind of engine there is."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for deciding in _deciding(node):
            names = NUMBERS_OF_STAGES if isinstance(node, ast.Subscript) else NUMBERS_OF_STAGES + ENGINES
            found.extend(part.lineno for part in ast.walk(deciding) if _is_about_stages(part, names))
    return sorted(set(found))


def _deciding(node):
    """The expressions by whose value `node` chooses."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return node.ifs
    if isinstance(node, ast.Match):
        return [node.subject]
    if isinstance(node, (ast.Compare, ast.BoolOp)) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
        return [node]
    if isinstance(node, ast.Subscript):
        return [node.slice]
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("isinstance", "bool"):
        return [node]
    return []


def _is_about_stages(node, names):
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    if name == "size":
        return isinstance(node, ast.Attribute) and getattr(node.value, "attr", getattr(node.value, "id", "")) == "pipe"
    return name in names


def test_nothing_else_asks():
    files = [*(ROOT / "megatron").rglob("*.py"), *(ROOT / name for name in ENTRY_POINTS)]
    names = {path.relative_to(ROOT).as_posix(): path for path in files}
    asking = {
        name: lines
        for name, path in names.items()
        if not name.startswith(MAY_ASK) and (lines := questions(path.read_text(encoding="utf-8")))
    }
    assert asking == {}


def test_one_place_of_the_engine_chooses_what_runs_the_stages():
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "megatron" / "engine").glob("*.py")}
    asking = {name: len(questions(source)) for name, source in files.items() if questions(source)}
    # One choice, the division of layers itself, and a warning about too few micro-batches.
    assert asking.keys() == {"build.py", "stages.py", "pipeline.py"}
    assert asking["build.py"] == asking["pipeline.py"] == 1


@pytest.mark.parametrize(
    "source",
    [
        "if grid.pipe.size > 1: pass",
        "x = 1 if args.parallelism.pipe_parallel_size else 2",
        "if not self.is_pipe_parallel: pass",
        "many = pipe.size == 1 or other",
        "engine = {0: plain}[pipe_parallel_size]",
        "rows = [row for row in rows if sizes.pp < 2]",
        "isinstance(engine, PipelineStage)",
        "match num_stages:\n    case 1: pass",
        "while num_stages: pass",
    ],
)
def test_questions_are_found(source):
    assert questions(source)


@pytest.mark.parametrize("source", ["f(grid.pipe.size)", "if grid.tensor.size == 1: pass", "if x.size: pass"])
def test_handing_a_number_on_is_no_question(source):
    assert not questions(source)
