"""jax on the CPU in float32, and compiled programs kept between runs."""

import ctypes
import gc
import logging
import os
from importlib.metadata import version
from pathlib import Path

# Read when Triton is imported, which transformers does: its kernels run in the interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Most of the suite's time goes into compilation: less of it, in one piece, and by the older code generator, which takes
# a third less and which jax 0.11 has no more.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jax") < "0.11" else ""),
)

# Threads of kernels that wait for work take a core from the processes beside them. One process of tests has several.
if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Commands in processes of their own write no line for a step that takes long on a busy machine.
os.environ.setdefault("DFLASH_PROGRESS", "0")
# Without the package's bytecode each of them would compile all modules anew, a tenth of the time of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# They share one directory of compiled programs with this process.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))

import hypothesis
import jax
import pytest

from tests.allowed_skips import unexpected

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", False)
jax.config.update("jax_default_matmul_precision", "float32")
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
# Programs without the lines of Python that they come from: these are a tenth of their lowering.
jax.config.update("jax_traceback_in_locations_limit", 0)

# No example fails for its time: a machine with other work takes any.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")


# Tests that ask the server of tests/server, whose programs take half a minute.
SERVED = ("tests/server/", "tests/cluster/", "tests/docs/test_code.py")
LONGEST = (
    *(*SERVED, "tests/mesh", "tests/training", "tests/engine/test_engine", "tests/docs/test_examples"),
    *("tests/integration/test_interpreted_engine", "tests/frontend/test_llm"),
    *("tests/integration", "tests/parity", "tests/cli", "tests/ops", "tests/decoding", "tests/engine/test_warm_up"),
)


def pytest_collection_modifyitems(items):
    """The longest files first, so that the others fill the time beside them.

    Those of one process are the very first: after a file of few tests they would wait for its end.
    """
    items.sort(key=lambda item: next((i for i, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)))


# Batch sizes that programs are compiled for, by the beginning of the test's name; others have those of users. Each size
# is a program for each width, of seconds. Where a request alone is compared with one in a batch, there is one for each.
BATCH_SIZES = {
    **dict.fromkeys(SERVED, (1, 4)),
    "tests/integration/test_logprobs.py": (8,),
    **dict.fromkeys(("tests/docs/test_examples.py", "tests/integration/test_draft_vocabulary.py"), (4, 32)),
    **dict.fromkeys(("tests/frontend/test_llm.py", "tests/frontend/test_vllm_names.py"), (1, 4, 32)),
    **dict.fromkeys(("tests/cli/test_generate.py", "tests/integration/test_bundled_drafters.py"), (1, 4, 32)),
}
_batch_sizes: dict[str, tuple[int, ...]] = {}


@pytest.fixture(autouse=True)
def costs_of_earlier_runs_are_not_known(monkeypatch):
    """What was measured on a busy machine decides no test."""
    from dflash_jax.engine import round_costs

    monkeypatch.setattr(round_costs, "RECORD_DAYS", 0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Sets the batch sizes where they change from one test to the next, so that those of a module's fixture stay."""
    sizes = next((sizes for name, sizes in BATCH_SIZES.items() if item.nodeid.startswith(name)), ())
    if sizes != _batch_sizes.get("now", ()):
        from dflash_jax.engine import model_runner

        default = _batch_sizes.setdefault("default", model_runner.BATCH_SIZES)
        _batch_sizes["now"] = sizes
        model_runner.BATCH_SIZES = sizes or default


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A process has whole files, and one process has all that are `SERVED`: the server starts once."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return SERVED[0] if nodeid.startswith(SERVED) else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


# The collector would traverse the millions of objects of all programs thousands of times: 7 % of the time.
gc.set_threshold(50_000, 20, 20)


# Bytes that a process of tests may have when a module of tests ends: on two cores, three of them run.
MOST_RESIDENT = 4 << 30


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_do_not_pile_up():
    """Each takes memory, and memory maps, of which Linux gives a process 65,530: XLA crashes without."""
    yield
    process = Path("/proc/self")
    if not process.exists():
        return
    resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > MOST_RESIDENT or (process / "maps").read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def logging_is_as_before():
    """Commands set up logging for their process, to a stream that ends with the test that called them."""
    root = logging.getLogger()
    level, handlers = root.level, set(root.handlers)
    yield
    root.setLevel(level)
    for handler in set(root.handlers) - handlers:
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


def without_unexpected_skip(report):
    """``report``, failed if it is a skip that tests/allowed_skips.py does not allow on this machine."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if message := unexpected(report.nodeid, reason.removeprefix("Skipped: ")):
            report.outcome, report.longrepr = "failed", message
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport():
    return without_unexpected_skip((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report():
    return without_unexpected_skip((yield))
