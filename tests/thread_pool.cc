// What test_thread_pool.py builds and runs: the pool without Python, whose corners no handler can be brought to at will.
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <thread>
#include <vector>

#include "parallel.h"
#include "scratch.h"

using namespace jaxfuse;

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) std::printf("line %d: %s\n", __LINE__, #condition), std::exit(1); \
  } while (false)

namespace {

int team_of(int n) {
  std::atomic<int> came{0};
  on_each_thread([&](int) { ++came; }, n);
  return came;
}

template <class F>
std::string thrown_by(F f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void sizes() {
  for (int n : {1, 2, 3, 16, 3}) {
    CHECK(ThreadPool::resize(n).empty() && max_threads() == n && team_of(0) == n);
  }
  CHECK(team_of(2) == 2 && team_of(1) == 1);
  CHECK(team_of(16) == 16);  // its threads are there, and oneDNN may have been told of them
}

void exceptions() {
  ThreadPool::resize(4);
  for (int thrower = 0; thrower < 4; ++thrower) {
    const auto loop = [&](int64_t chunk) {
      if (chunk == thrower) throw std::runtime_error("chunk " + std::to_string(chunk));
    };
    CHECK(thrown_by([&] { parallel_for(4, loop); }) == "chunk " + std::to_string(thrower));
    CHECK(thrown_by([&] { on_each_thread([&](int) { parallel_for(4, loop); }); }) == "chunk " + std::to_string(thrower));
    const auto meets = [&](int thread) {
      ThreadPool::instance().barrier();
      if (thread == thrower) throw std::runtime_error("early");
      ThreadPool::instance().barrier();
    };
    for (int i = 0; i < 20; ++i) CHECK(thrown_by([&] { on_each_thread(meets); }) == "early");
    CHECK(thrown_by([] { on_each_thread([](int) { ThreadPool::instance().barrier(); }); }).empty());
  }
  CHECK(team_of(0) == 4);
}

// Each chunk once; a thread's own share first, and if one is held up, the other takes what is left of both.
void shares() {
  constexpr int64_t kChunks = 64;
  ThreadPool::resize(2);
  for (int held = 0; held < 2; ++held) {
    std::atomic<int> began[2] = {}, done[2] = {};
    std::vector<std::atomic<int>> threads(kChunks);
    parallel_for(kChunks, [&](int64_t chunk) {
      const int thread = ThreadPool::thread_number();
      if (began[thread]++ == 0) {
        CHECK(chunk == thread * kChunks / 2);
        while (began[1 - thread] == 0) std::this_thread::yield();
        while (thread == held && done[1 - thread] < kChunks - 1) std::this_thread::yield();
      }
      threads[chunk] += 1 + thread;
      ++done[thread];
    });
    for (int64_t i = 0; i < kChunks; ++i) CHECK(threads[i] == 1 + (i == held * kChunks / 2 ? held : 1 - held));
  }
  for (int64_t chunks : {0, 1, 2, 3, 7}) {
    std::vector<std::atomic<int>> times(chunks);
    parallel_for(chunks, [&](int64_t chunk) { ++times[chunk]; });
    for (const auto& n : times) CHECK(n == 1);
  }
}

volatile float tiny = 1e-38f;

void denormals() {
  ThreadPool::resize(4);
  const auto each = [](float expected) {
    on_each_thread([&](int) { CHECK(tiny * 0.25f == expected); });
  };
  constexpr float kept = 0.25e-38f;
  each(kept);
  {
    const DenormalsFlushed mode;
    each(0);
  }
  each(kept);
}

void invalid_operations() {
  ThreadPool::resize(4);
  for (int thread = 0; thread < 4; ++thread) {
    ThreadPool::forget_invalid();
    CHECK(!ThreadPool::saw_invalid());
    on_each_thread([&](int own) {
      volatile float infinite = INFINITY;
      if (own == thread) infinite = infinite - infinite;
    });
    CHECK(ThreadPool::saw_invalid());
  }
}

// More threads than processors, of which each waits for all others.
void one_processor() {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
  ThreadPool::resize(4);
  for (int i = 0; i < 10; ++i) {
    std::atomic<int> rounds{0};
    on_each_thread([&](int) {
      for (int round = 0; round < 10; ++round) {
        ++rounds;
        ThreadPool::instance().barrier();
        CHECK(rounds >= 4 * (round + 1));
      }
    });
    CHECK(rounds == 40);
  }
}

// A worker that wakes on the caller's processor goes to another one, however busy the others are, and may come back later.
void workers_leave_the_callers_processor() {
  cpu_set_t all, own, others;
  CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
  if (CPU_COUNT(&all) < 2) return;
  const int here = sched_getcpu();
  CPU_ZERO(&own);
  CPU_SET(here, &own);
  others = all;
  CPU_CLR(here, &others);
  std::atomic<bool> over{false};
  std::vector<std::thread> busy;
  for (int i = 0; i < CPU_COUNT(&others); ++i) {
    busy.emplace_back([&] {
      CHECK(sched_setaffinity(0, sizeof others, &others) == 0);
      while (!over) continue;
    });
  }
  CHECK(sched_setaffinity(0, sizeof own, &own) == 0);
  ThreadPool::resize(2);
  pid_t worker = 0;
  int where = -1;
  const auto region = [&] {
    on_each_thread([&](int thread) {
      if (thread == 1) worker = gettid(), where = sched_getcpu();
      ThreadPool::instance().barrier();
    });
  };
  region();
  for (int i = 0; i < 20; ++i) {
    CHECK(sched_setaffinity(worker, sizeof own, &own) == 0 && sched_setaffinity(worker, sizeof all, &all) == 0);
    region();
    CHECK(where != here);
    cpu_set_t now;
    CHECK(sched_getaffinity(worker, sizeof now, &now) == 0 && CPU_EQUAL(&now, &all));
  }
  over = true;
  for (std::thread& thread : busy) thread.join();
}

// How often each of the process's threads but this one has slept.
std::map<std::string, std::string> sleeps() {
  std::map<std::string, std::string> found;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(getpid())) continue;
    std::ifstream file(task.path() / "status");
    for (std::string line; std::getline(file, line);) {
      if (line.rfind("voluntary_ctxt_switches", 0) == 0) found[task.path()] = line;
    }
  }
  return found;
}

void only_the_team_wakes() {
  ThreadPool::resize(16);
  team_of(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const auto before = sleeps();
  for (int i = 0; i < 50; ++i) team_of(2);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  int woken = 0;
  for (const auto& [thread, count] : sleeps()) woken += before.at(thread) != count;
  CHECK(before.size() == 15 && woken <= 1);
}

// Enough address space for `stacks` more threads.
void leave_room_for(int stacks) {
  rlimit limit;
  pthread_attr_t attributes;
  size_t stack;
  pthread_attr_init(&attributes);
  pthread_attr_getstacksize(&attributes, &stack);
  long pages;
  std::ifstream("/proc/self/statm") >> pages;
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = pages * sysconf(_SC_PAGESIZE) + stacks * stack + stack / 2;
  setrlimit(RLIMIT_AS, &limit);
}

void unlimited() {
  rlimit limit;
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_AS, &limit);
}

void threads_that_cannot_start() {
  ThreadPool::resize(2);
  leave_room_for(0);
  CHECK(!ThreadPool::resize(4).empty());
  CHECK(max_threads() == 2 && team_of(0) == 2);
  leave_room_for(1);
  CHECK(!ThreadPool::resize(4).empty());
  CHECK(max_threads() == 3 && team_of(0) == 3);
  unlimited();
  CHECK(ThreadPool::resize(4).empty() && team_of(0) == 4);
}

void in_child(void (*f)()) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    f();
    _exit(0);
  }
  int status;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void forks() {
  ThreadPool::resize(3);
  std::atomic<bool> done{false};
  std::vector<std::thread> busy;  // hold the pool and the scratch memory's lock while the process forks
  for (int i = 0; i < 2; ++i) {
    busy.emplace_back([&] {
      while (!done) Scratch(1 << 16), team_of(0);
    });
  }
  for (int i = 0; i < 20; ++i) {
    in_child([] {
      Scratch memory(1 << 16);
      CHECK(max_threads() == 3 && team_of(0) == 3);
    });
  }
  done = true;
  for (std::thread& each : busy) each.join();
  in_child([] {
    leave_room_for(0);
    CHECK(team_of(0) == max_threads());
  });
}

// At the end: it exits while a thread is in a region.
void exits_in_a_region() {
  std::atomic<bool> begun{false};
  std::thread([&] {
    on_each_thread([&](int) {
      begun = true;
      for (;;) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }).detach();
  while (!begun) std::this_thread::yield();
  std::exit(0);
}

const std::pair<const char*, void (*)()> kTests[] = {
    {"sizes", sizes},
    {"exceptions", exceptions},
    {"shares", shares},
    {"denormals", denormals},
    {"invalid_operations", invalid_operations},
    {"one_processor", one_processor},
    {"workers_leave_the_callers_processor", workers_leave_the_callers_processor},
    {"only_the_team_wakes", only_the_team_wakes},
    {"threads_that_cannot_start", threads_that_cannot_start},
    {"forks", forks},
    {"exits_in_a_region", exits_in_a_region},
};

}  // namespace

int main(int, char** arguments) {
  for (const auto& [name, test] : kTests) {
    if (!std::strcmp(name, arguments[1])) return test(), 0;
  }
  return 2;
}
