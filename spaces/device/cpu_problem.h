/* What every CPU kernel file begins with: system headers (above the target pragma of cpu_isa.h), threads, vectors,
 * epilogues, and small macros.
 */
#ifndef KT_CPU_PROBLEM_H
#define KT_CPU_PROBLEM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_getcpu and thread affinity */
#endif
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu_pool.h"
#include "cpu_isa.h"
#include "cpu_epilogue.h"
#include "cpu_reduce.h"

#ifndef KT_DESCRIBE
#define KT_DESCRIBE "{}"
#endif

#define KT_CEIL_DIV(a, b) (((a) + (b) - 1) / (b))
#define KT_MIN(a, b) ((a) < (b) ? (a) : (b))
#define KT_ROUND_UP(bytes) (((bytes) + 255) / 256 * 256)

const char *kt_describe(void) { return KT_DESCRIBE; }

#endif
