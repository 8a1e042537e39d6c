// The end of a program: how its kernels are called from Python, in this process or (with a sanitizer) as a process of its own.
//
// `kernels` (name, function) is written by kernels/emulator/compiler.py. A sanitizer's process reads one launch from a file and writes the
// buffers back: every buffer is an allocation of its exact size.
#pragma once
#include <unistd.h>

#include "device_layer.h"

namespace emulator {
struct Entry {
  const char* name;
  const char* (*launch)(size_t n, dim3 grid, dim3 size, size_t shared, void** arguments, uint64_t seed);
};
const char* launch_by_name(const Entry* entries, size_t n_entries, const char* name, const unsigned* shape, size_t shared, void** arguments,
                           size_t n, uint64_t seed) {
  for (size_t i = 0; i < n_entries; i++)
    if (!strcmp(entries[i].name, name))
      return entries[i].launch(n, dim3(shape[0], shape[1], shape[2]), dim3(shape[3], shape[4], shape[5]), shared, arguments, seed);
  return "there is no such kernel";
}

struct Reader {
  FILE* file;
  void operator()(void* to, size_t bytes) {
    if (bytes && fread(to, 1, bytes, file) != bytes) exit(3);
  }
  template <class T>
  T one() {
    T t;
    (*this)(&t, sizeof t);
    return t;
  }
};

// File: name (64 bytes), six u32, shared u64, seed u64, n u32; for each argument: 1 if a buffer, bytes u64, its bytes.
inline int run_file(const Entry* entries, size_t n_entries, const char* in, const char* out) {
  Reader read{fopen(in, "rb")};
  char name[64];
  unsigned shape[6];
  read(name, sizeof name);
  read(shape, sizeof shape);
  const auto shared = read.one<uint64_t>(), seed = read.one<uint64_t>();
  const auto n = read.one<uint32_t>();
  std::vector<void*> buffers(n), arguments(n);
  std::vector<uint64_t> bytes(n);
  std::vector<char> is_buffer(n);
  for (uint32_t i = 0; i < n; i++) {
    is_buffer[i] = read.one<char>();
    bytes[i] = read.one<uint64_t>();
    if (posix_memalign(&buffers[i], 256, bytes[i] ? bytes[i] : 1)) return 4;
    read(buffers[i], bytes[i]);
    arguments[i] = is_buffer[i] ? (void*)&buffers[i] : buffers[i];
  }
  fclose(read.file);
  if (const char* error = launch_by_name(entries, n_entries, name, shape, shared, arguments.data(), n, seed)) {
    fprintf(stderr, "emulator: %s\n", error);
    return 2;
  }
  FILE* file = fopen(out, "wb");
  for (uint32_t i = 0; i < n; i++)
    if (is_buffer[i]) fwrite(buffers[i], 1, bytes[i], file);
  fclose(file);
  _exit(0);  // what is torn down at exit belongs to no fiber
}
}  // namespace emulator
