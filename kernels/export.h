// What Python calls: plain C names, visible outside the library.
#pragma once
#define RELAY_EXPORT extern "C" __attribute__((visibility("default")))
