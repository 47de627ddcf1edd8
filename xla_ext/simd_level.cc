#include "simd_level.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "handler.h"

namespace jaxfuse {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512"};

#ifdef __x86_64__
// clang's __builtin_cpu_supports does not know these names.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
bool has_avxvnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bit_AVXVNNI);
}
#endif

bool cpu_has_vnni() {
#if defined(__x86_64__) && !defined(JAXFUSE_EMULATE_AVX512)
  switch (simd_level()) {
    case SimdLevel::avx512: return __builtin_cpu_supports("avx512vnni");
    case SimdLevel::avx2: return has_avxvnni();
    default: break;
  }
#endif
  return false;
}

// The CPU has the instructions, the system saves their registers (XCR0's bits 17 and 18), and this process may have them: which it must ask
// for, as https://docs.kernel.org/arch/x86/xstate.html says.
bool cpu_has_amx() {
#if defined(JAXFUSE_EMULATE_AVX512)
  return true;
#elif defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kOsxsave = 1u << 27, kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
  constexpr unsigned kAll = kAmxBf16 | kAmxTile | kAmxInt8;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kOsxsave)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
  constexpr unsigned kSaved = 3u << 17;
  asm("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return (a & kSaved) == kSaved && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

SimdLevel cpu_level() {
#ifdef JAXFUSE_EMULATE_AVX512
  return SimdLevel::avx512;
#endif
#ifdef __x86_64__
  __builtin_cpu_init();  // static initialisers may run before the compiler's own call of it
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return SimdLevel::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) return SimdLevel::avx2;
#endif
  return SimdLevel::portable;
}

constexpr const char* kWithAmx = "avx512_amx";

bool leaves_amx_in(const char* wanted) { return !wanted || wanted == std::string(kWithAmx); }

SimdLevel chosen_level() {
  const SimdLevel highest = cpu_level();
  const char* wanted = std::getenv("JAXFUSE_SIMD");
  if (!wanted || (wanted == std::string(kWithAmx) && cpu_has_amx())) return highest;
  for (int level = 0; level <= int(highest); ++level) {
    if (std::string(wanted) == kNames[level]) return SimdLevel(level);
  }
  throw std::runtime_error(std::string("the environment variable JAXFUSE_SIMD is \"") + wanted +
                              "\", expected portable, avx2, avx512 or " + kWithAmx + ", and this CPU has " +
                           (cpu_has_amx() ? kWithAmx : kNames[int(highest)]) + "; unset it to use that");
}

std::string described_level(bool int8) {
  try {
    return std::string(kNames[int(simd_level())]) + (!int8 ? "" : has_amx() ? "_amx" : has_vnni() ? "_vnni" : "");
  } catch (const std::runtime_error& problem) {
    return problem.what();
  }
}

const bool described = facts().emplace("simd", described_level(false)).second && facts().emplace("int8", described_level(true)).second &&
                       facts().emplace("vectors", halves_vectors() ? "halved" : "whole").second;

}  // namespace

SimdLevel simd_level() {
  static const SimdLevel level = chosen_level();
  return level;
}

bool has_vnni() {
  // Asked once: in a virtual machine the instruction that asks may take tens of microseconds.
  static const bool has = cpu_has_vnni();
  return has;
}

bool has_amx() {
  static const bool has = simd_level() == SimdLevel::avx512 && leaves_amx_in(std::getenv("JAXFUSE_SIMD")) && cpu_has_amx();
  return has;
}

bool halves_vectors() {
#ifdef __x86_64__
  static const bool halves = __builtin_cpu_is("znver1") || (__builtin_cpu_is("amdfam19h") && __builtin_cpu_supports("avx512f"));
  return halves;
#else
  return false;
#endif
}

bool is_intel() {
#ifdef __x86_64__
  static const bool is = __builtin_cpu_is("intel");
  return is;
#else
  return false;
#endif
}

}  // namespace jaxfuse
