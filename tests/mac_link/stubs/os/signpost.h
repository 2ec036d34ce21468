// What torch's MPSProfiler.h names and Darwin's own headers, as zig has them, lack.
#pragma once
#include <os/log.h>
#include <stdint.h>
#include <time.h>
typedef uint64_t os_signpost_id_t;
typedef uint8_t os_signpost_type_t;
