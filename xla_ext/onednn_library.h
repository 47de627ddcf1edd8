// The oneDNN library: a private copy (private_onednn.py), opened by its path, whose functions no other library of the process
// can serve or be served.
#pragma once

#include <string>

struct link_map;

namespace jaxfuse::onednn {

// Opens the library, unless that was done, and puts it on our threads. Returns "", or why it cannot be used: then nothing of
// it is called, and it is left as it was.
std::string load(const std::string& path);

// Whether its functions may be called.
bool is_loaded();

// Points the library's OpenMP entry points at ThreadPool (onednn_threads.cc): all of them or none. Returns "", or why not.
std::string take_over(const link_map& library);

}  // namespace jaxfuse::onednn
