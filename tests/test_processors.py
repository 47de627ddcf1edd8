"""How many threads there are by default, and which limit decides: on machines made of files."""

import warnings

import pytest

from jaxfuse.runtime import processors

EIGHT = frozenset(range(8))
V1 = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/"


def machine(root, cgroup="0::/", siblings=None, **files):
    """A root folder with these control groups' files (their paths below /sys/fs/cgroup) and siblings of processors."""
    contents = {f"sys/fs/cgroup/{path}": text for path, text in files.items()} | {"proc/self/cgroup": cgroup}
    for number, text in (siblings or {}).items():
        contents[f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"] = text
    for path, text in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


def limit(root, **environment):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return processors.limit(environment, root, EIGHT)


def test_processors_that_the_process_may_run_on(tmp_path):
    assert limit(machine(tmp_path)) == (8, "processors that the process may run on: 8")


def test_a_thread_for_each_physical_core(tmp_path):
    siblings = {i: f"{i % 4},{i % 4 + 4}" for i in range(8)}
    found = limit(machine(tmp_path, siblings=siblings))
    assert found.number == 4 and "physical cores" in found.reason
    assert processors.limit({}, tmp_path, frozenset({0, 4})).number == 1
    assert processors.limit({}, tmp_path, frozenset({0, 1, 4})).number == 2


QUOTAS = {
    "of a container, rounded up": (2, "0::/", {"cpu.max": "150000 100000"}),
    "of a group": (3, "0::/a.slice/b", {"a.slice/b/cpu.max": "300000 100000"}),
    "of the group around it": (1, "0::/a.slice/b", {"a.slice/b/cpu.max": "300000 100000", "a.slice/cpu.max": "50000 100000"}),
    "none": (8, "0::/a", {"a/cpu.max": "max 100000"}),
    "more than there are": (8, "0::/a", {"a/cpu.max": "6400000 100000"}),
    "of another group": (8, "0::/a", {"b/cpu.max": "100000 100000"}),
    "named as the host names it": (2, "0::/docker/abc", {"cpu.max": "200000 100000"}),
    "version 1": (2, V1, {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "150000", "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000"}),
    "version 1, in a container": (4, V1, {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}),
    "version 1, none": (8, V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}),
    "both versions": (2, V1, {"unified/cpu.max": "200000 100000", "cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}),
    "unreadable": (8, "0::/", {"cpu.max": ""}),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_cpu_quota(tmp_path, name):
    number, cgroup, files = QUOTAS[name]
    found = limit(machine(tmp_path, cgroup, **files))
    assert found.number == number and ("CPU quota" in found.reason) == (number < 8)


def test_who_asks_gets_it(tmp_path):
    root = machine(tmp_path, **{"cpu.max": "200000 100000"})
    assert limit(root, OMP_NUM_THREADS="5") == (5, "OMP_NUM_THREADS")
    assert limit(root, OMP_NUM_THREADS=" 3,2 ").number == 3
    assert limit(root, OMP_NUM_THREADS="100000").number == processors.MOST_THREADS
    assert limit(root, OMP_NUM_THREADS="").number == 2


@pytest.mark.parametrize("asked", ["0", "-3", "two", "2.5", "1e3", ",2"])
def test_a_number_that_is_none_is_named_and_ignored(tmp_path, asked):
    root = machine(tmp_path, **{"cpu.max": "200000 100000"})
    with pytest.warns(UserWarning, match=f'OMP_NUM_THREADS is "{asked}", expected .* 2 threads .CPU quota of 2 processors in /sys'):
        assert processors.limit({"OMP_NUM_THREADS": asked}, root, EIGHT).number == 2


class Native:
    """As the native module where the system allows two threads."""

    def set_num_threads(self, n):
        self.n = min(n, 2)
        return "Resource temporarily unavailable" if n > 2 else ""

    def num_threads(self):
        return self.n


def test_threads_that_the_system_refuses():
    assert processors.start(Native(), processors.Limit(2, "asked")) == (2, "asked")
    with pytest.warns(UserWarning, match="only 2 of 5 threads .asked. can be started, the system says: Resource temp"):
        number, reason = processors.start(Native(), processors.Limit(5, "asked"))
    assert number == 2 and "allows of 5" in reason
