// What torch's MPSProfiler.h names.
#pragma once
typedef struct os_log_s* os_log_t;
