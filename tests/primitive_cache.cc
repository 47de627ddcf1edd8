// What test_thread_pool.py builds and runs: the cache of primitives in processes that fork while other threads look into it.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "onednn/primitive.h"

using namespace jaxfuse::onednn;

namespace {

void look(int64_t key) {
  cached({key}, [] { return SharedPrimitive(); });
}

bool child_can_look() {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    for (int64_t key = 0; key < 2000; ++key) look(key);
    _exit(0);
  }
  int status;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

int main() {
  std::atomic<bool> done{false};
  std::vector<std::thread> busy;
  for (int i = 0; i < 2; ++i) {
    busy.emplace_back([&, i] {
      for (int64_t key = i; !done; ++key) look(key % 2000);  // more than are kept, so that it changes all the time
    });
  }
  bool whole = true;
  for (int i = 0; whole && i < 20; ++i) whole = child_can_look();
  done = true;
  for (std::thread& each : busy) each.join();
  if (!whole) std::printf("a child did not come back from the cache\n");
  return !whole;
}
