// The oneDNN library: a private copy (private_copy.py), opened by its path, whose functions no other library of the process
// can serve or be served.
#pragma once

#include <string>

struct link_map;

namespace jaxfuse::onednn {

// Points the library's OpenMP entry points at ThreadPool (threads.cc): all of them or none. Returns "", or why not.
std::string take_over(const link_map& library);

}  // namespace jaxfuse::onednn
