// Puts oneDNN on our threads. Its PyPI build calls an OpenMP runtime, through a table of addresses that the dynamic linker
// filled in (the entries of its procedure linkage table, R_X86_64_JUMP_SLOT). Here the ten entries that belong to OpenMP
// are pointed at ThreadPool instead: in our copy of the library only, no other user of OpenMP in the process is touched.
// Where that cannot be done oneDNN is not used (see thread_pool.h for what OpenMP would cost, and invalid_flag.h for why the
// threads must be known).
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "library.h"
#include "thread_pool.h"

namespace jaxfuse::onednn {
namespace {

// --- The OpenMP entry points that oneDNN uses, as GCC calls them

void parallel_start(void (*work)(void*), void* argument, unsigned n) { ThreadPool::instance().start(work, argument, n); }
void parallel_end() { ThreadPool::instance().finish(); }
void barrier() { ThreadPool::instance().barrier(); }
int get_max_threads() { return ThreadPool::instance().size(); }
int get_num_threads() { return ThreadPool::team_size(); }
int get_thread_num() { return ThreadPool::thread_number(); }
int in_parallel() { return ThreadPool::in_parallel(); }

// A loop with a static schedule: the calling thread's next range of iterations. chunk 0: one range for each thread.
struct StaticLoop {
  long begin, step, iterations, chunk, next;
};
thread_local StaticLoop loop;

bool loop_next(long* first, long* last) {
  if (loop.next >= loop.iterations) return false;
  const long threads = ThreadPool::team_size(), t = ThreadPool::thread_number();
  long from = loop.next, to;
  if (loop.chunk > 0) {
    to = std::min(from + loop.chunk, loop.iterations);
    loop.next += loop.chunk * threads;
  } else {
    const long share = loop.iterations / threads, rest = loop.iterations % threads;
    from = t * share + std::min(t, rest);
    to = from + share + (t < rest);
    loop.next = loop.iterations;
  }
  *first = loop.begin + from * loop.step;
  *last = loop.begin + to * loop.step;
  return from < to;
}

bool loop_start(long begin, long end, long step, long chunk, long* first, long* last) {
  const long iterations = step > 0 ? (end - begin + step - 1) / step : (begin - end - step - 1) / -step;
  loop = {begin, step, std::max(0L, iterations), chunk, chunk * ThreadPool::thread_number()};
  return loop_next(first, last);
}

void loop_end() {}

struct Entry {
  const char* name;
  void* ours;
};

template <class F>
void* address(F* function) { return reinterpret_cast<void*>(function); }

const Entry kEntries[] = {
    {"GOMP_parallel_start", address(parallel_start)}, {"GOMP_parallel_end", address(parallel_end)},
    {"GOMP_barrier", address(barrier)},               {"GOMP_loop_static_start", address(loop_start)},
    {"GOMP_loop_static_next", address(loop_next)},    {"GOMP_loop_end_nowait", address(loop_end)},
    {"omp_get_max_threads", address(get_max_threads)}, {"omp_get_num_threads", address(get_num_threads)},
    {"omp_get_thread_num", address(get_thread_num)},  {"omp_in_parallel", address(in_parallel)},
};

// --- The table

struct Table {
  uintptr_t base = 0;
  const Elf64_Rela* slots = nullptr;
  size_t n_slots = 0;
  const Elf64_Sym* symbols = nullptr;
  const char* names = nullptr;
};

Table table_of(uintptr_t base, const Elf64_Dyn* dynamic) {
  Table table{base};
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    const void* at = reinterpret_cast<const void*>(dynamic->d_un.d_ptr);
    switch (dynamic->d_tag) {
      case DT_JMPREL: table.slots = static_cast<const Elf64_Rela*>(at); break;
      case DT_PLTRELSZ: table.n_slots = dynamic->d_un.d_val / sizeof(Elf64_Rela); break;
      case DT_SYMTAB: table.symbols = static_cast<const Elf64_Sym*>(at); break;
      case DT_STRTAB: table.names = static_cast<const char*>(at); break;
    }
  }
  return table;
}

// The slot of each entry, or null.
struct Slots {
  void** of[std::size(kEntries)] = {};
  bool complete() const { return std::all_of(std::begin(of), std::end(of), [](void** slot) { return slot; }); }
};

Slots slots_of(const Table& table) {
  Slots slots;
  for (size_t i = 0; i < table.n_slots; ++i) {
    const Elf64_Rela& slot = table.slots[i];
    const char* name = table.names + table.symbols[ELF64_R_SYM(slot.r_info)].st_name;
    for (size_t entry = 0; entry < std::size(kEntries); ++entry) {
      if (!std::strcmp(name, kEntries[entry].name)) slots.of[entry] = reinterpret_cast<void**>(table.base + slot.r_offset);
    }
  }
  return slots;
}

// After the linker is done the table is read-only; it is again when we are.
bool protect(void** slot, int protection) {
  const uintptr_t page = sysconf(_SC_PAGESIZE), start = reinterpret_cast<uintptr_t>(slot) / page * page;
  return mprotect(reinterpret_cast<void*>(start), page, protection) == 0;
}

}  // namespace

std::string take_over(const link_map& library) {
  const Table table = table_of(library.l_addr, library.l_ld);
  if (!table.slots || !table.symbols || !table.names) return "it has no linkage table";
  const Slots slots = slots_of(table);
  if (!slots.complete()) return "it is not the OpenMP build that this was made for";
  // All pages are opened before the first slot is written: nothing is to be undone where one stays closed.
  const auto all = [&](int protection) {
    return std::all_of(std::begin(slots.of), std::end(slots.of), [&](void** slot) { return protect(slot, protection); });
  };
  if (!all(PROT_READ | PROT_WRITE)) {
    all(PROT_READ);
    return "its linkage table is locked";
  }
  for (size_t entry = 0; entry < std::size(kEntries); ++entry) *slots.of[entry] = kEntries[entry].ours;
  all(PROT_READ);
  return "";
}

}  // namespace jaxfuse::onednn
