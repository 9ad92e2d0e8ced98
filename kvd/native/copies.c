/* Copies between engine memory and slots of the pool, and checksums of what is copied, in one pass;
 * blocks moved between memory and a file, by several threads, and proved meanwhile; the tables of
 * tags that clients read, and the index in which control finds a key's slot; and, at the end, how
 * descriptors that strangers gave are closed.
 *
 * Without any library but the system's and without Python: kvd/native loads it by ctypes, which
 * lets go of the interpreter's lock. Stretches of memory are copied LANES at a time, a few cache
 * lines of each in turn: more pages are then open at once, and one processor gets more of the
 * memory's speed than by one large memcpy. What is written goes past the cache, for nobody here
 * reads it again.
 *
 * The checksum is the one of kvd/mover/checksums.py: every word times a key of its place in its
 * line, each line's sum times a key of the line, all added up modulo 2^64. So what each stretch
 * adds to the sum of its part can be added in any order.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#ifndef KVD_SOURCE
#define KVD_SOURCE "unknown"
#endif
/* Two shapes of the loop, both measured. NEAR: LANES lanes, a TURN of each, and what comes next is
 * fetched into the nearest cache. FAR: fewer lanes, shorter turns, and fetched long before, into the
 * second cache. Lanes begin where the same sets of the nearest cache are theirs: in one of eight
 * ways (AMD) eight lanes and the keys drive one another out, in one of twelve (Intel) they don't. */
#define LANES 8
#define TURN 256
#define AHEAD 384 /* bytes. With 512, sums took a sixth of the speed (Intel) */
#define FAR_LANES 6
#define FAR_TURN 128
#define FAR_AHEAD 2048
/* Bytes of a stretch that one lane takes: no multiple of 128 KiB, at which addresses share a set of
 * the second cache and, where pages lie side by side, a bank of the memory. With 256 KiB a copy
 * of large blocks took up to a fifth longer, by where its memory happened to lie (Intel). */
#define MOST_CUT (136 << 10)
#define LEAST_CUT (4 << 10)
#define LINE_WORDS 1024
#define LINE_BYTES (8 * LINE_WORDS)
#define MOST ((uint64_t)1 << 46) /* bytes; sums of a few of them can't overflow */

enum { LOAD, STORE, SUM };
enum { DONE, NO_SUCH_LEVEL, BAD_ROW, BAD_BLOCK, BAD_SUM, OUTSIDE_MEMORY, STOPPED };

/* A stretch of every engine block: block b's begins b * stride bytes after `memory`, in a slot it
 * is `at` bytes from where the engine block begins. `room`: bytes of memory from there on. */
struct row { uint8_t *memory; uint64_t room, stride, bytes, at; };

/* An engine block in a slot: `offset` bytes into an extent with `room` bytes. `place`: bytes from
 * where the slot's part begins; `sum`: which of the sums is the slot's. */
struct block { uint8_t *extent; uint64_t room, offset, engine, place, sum; };

/* A word that may say stop, in memory that others write: once it is at least `least`, unless it is
 * all ones. */
struct watch { const volatile uint64_t *word; uint64_t least; };

struct work {
  const struct row *rows;
  const struct block *blocks;
  uint64_t row_count, block_count, kind;
  uint64_t *sums; /* none: nothing is summed up */
  const uint64_t *word_keys, *line_keys;
  uint64_t sum_count, line_count;
  const struct watch *watches;
  uint64_t watch_count;
};

struct lane {
  uint8_t *to;
  const uint8_t *from;
  const uint64_t *keys;
  uint64_t line_key, *sum;
  uint64_t turns; /* bytes before the next look: whole turns within one line */
  uint64_t left, place; /* bytes after those; bytes of the part before them */
};

struct walk { const struct work *work; uint64_t block, row, done, cut; int flaw; };

typedef void turns(struct lane *lanes, int count, uint64_t bytes, int copying, int summing,
                   int far);

#define INLINE static inline __attribute__((always_inline))

/* -- what is not a whole turn, and what knows no processor ------------------------------------- */

static void crumbs(const struct work *work, struct lane *lane, uint64_t bytes) {
  if (work->sums) {
    const uint64_t *keys = work->word_keys + lane->place / 8 % LINE_WORDS;
    uint64_t total = 0, word;
    for (uint64_t at = 0; at < bytes; at += 8) {
      memcpy(&word, lane->from + at, 8);
      if (work->kind != SUM) memcpy(lane->to + at, &word, 8);
      total += word * *keys++;
    }
    *lane->sum += total * work->line_keys[lane->place / LINE_BYTES];
  } else {
    memcpy(lane->to, lane->from, bytes);
  }
  if (lane->to) lane->to += bytes;
  lane->from += bytes;
  lane->place += bytes;
  lane->left -= bytes;
}

INLINE void turns_plain(struct lane *lanes, int count, uint64_t bytes, int copying, int summing,
                        int far) {
  (void)far;
  for (int n = 0; n < count; n++) {
    struct lane *lane = lanes + n;
    uint64_t total = 0, word;
    if (copying) memcpy(lane->to, lane->from, bytes);
    for (uint64_t at = 0; summing && at < bytes; at += 8) {
      memcpy(&word, lane->from + at, 8);
      total += word * lane->keys[at / 8];
    }
    if (summing) *lane->sum += total * lane->line_key;
  }
}

#if defined(__x86_64__)

#define FETCH(address)                                              \
  if (far) _mm_prefetch((const char *)(address) + FAR_AHEAD, _MM_HINT_T1); \
  else _mm_prefetch((const char *)(address) + AHEAD, _MM_HINT_T0)

#define TAKE_LANES                                       \
  const int turn = far ? FAR_TURN : TURN;                \
  const uint8_t *from[LANES];                            \
  uint8_t *to[LANES];                                    \
  const uint8_t *keys[LANES];                            \
  for (int n = 0; n < count; n++) {                      \
    from[n] = lanes[n].from;                             \
    to[n] = lanes[n].to;                                 \
    keys[n] = (const uint8_t *)lanes[n].keys;            \
  }

__attribute__((target("avx512f,avx512dq"))) INLINE void turns_avx512(
    struct lane *lanes, int count, uint64_t bytes, int copying, int summing, int far) {
  TAKE_LANES
  __m512i total[LANES];
  for (int n = 0; n < count; n++) total[n] = _mm512_setzero_si512();
  for (uint64_t at = 0; at < bytes; at += (uint64_t)turn) {
#pragma GCC unroll 8
    for (int n = 0; n < count; n++) {
#pragma GCC unroll 8
      for (int part = 0; part < turn; part += 64) {
        FETCH(from[n] + at + part);
        __m512i words = _mm512_loadu_si512(from[n] + at + part);
        if (copying) _mm512_stream_si512((void *)(to[n] + at + part), words);
        if (summing) {
          __m512i key = _mm512_loadu_si512(keys[n] + at + part);
          total[n] = _mm512_add_epi64(total[n], _mm512_mullo_epi64(words, key));
        }
      }
    }
  }
  for (int n = 0; summing && n < count; n++) {
    uint64_t totals[8], sum = 0;
    _mm512_storeu_si512(totals, total[n]);
    for (int part = 0; part < 8; part++) sum += totals[part];
    *lanes[n].sum += sum * lanes[n].line_key;
  }
}

__attribute__((target("avx2"))) INLINE void turns_avx2(
    struct lane *lanes, int count, uint64_t bytes, int copying, int summing, int far) {
  TAKE_LANES
  __m256i low[LANES], high[LANES]; /* of the products; high counts from bit 32 on */
  for (int n = 0; n < count; n++) low[n] = high[n] = _mm256_setzero_si256();
  for (uint64_t at = 0; at < bytes; at += (uint64_t)turn) {
#pragma GCC unroll 8
    for (int n = 0; n < count; n++) {
#pragma GCC unroll 8
      for (int part = 0; part < turn; part += 32) {
        if (part % 64 == 0) { FETCH(from[n] + at + part); }
        __m256i words = _mm256_loadu_si256((const __m256i *)(from[n] + at + part));
        if (copying) _mm256_stream_si256((__m256i *)(to[n] + at + part), words);
        if (summing) {
          __m256i key = _mm256_loadu_si256((const __m256i *)(keys[n] + at + part));
          __m256i crossed = _mm256_mullo_epi32(words, _mm256_shuffle_epi32(key, 0xB1));
          low[n] = _mm256_add_epi64(low[n], _mm256_mul_epu32(words, key));
          high[n] = _mm256_add_epi32(high[n], crossed);
        }
      }
    }
  }
  for (int n = 0; summing && n < count; n++) {
    uint64_t lows[4], total = 0;
    uint32_t highs[8];
    _mm256_storeu_si256((__m256i *)lows, low[n]);
    _mm256_storeu_si256((__m256i *)highs, high[n]);
    for (int part = 0; part < 4; part++)
      total += lows[part] + ((uint64_t)(highs[2 * part] + highs[2 * part + 1]) << 32);
    *lanes[n].sum += total * lanes[n].line_key;
  }
}
#endif

/* -- which bytes ------------------------------------------------------------------------------- */

/* Do what is before and after the whole turns of the lane's next line, or of all it has where
 * nothing is summed up. False: it has no more. */
static int prepare(const struct work *work, struct lane *lane) {
  while (lane->left) {
    uint64_t bytes = lane->left, head = 0;
    if (work->sums && bytes > LINE_BYTES - lane->place % LINE_BYTES)
      bytes = LINE_BYTES - lane->place % LINE_BYTES;
    if (work->kind != SUM) head = -(uintptr_t)lane->to & 63;
    if (bytes < head + TURN || (work->sums && head % 8)) {
      crumbs(work, lane, bytes);
      continue;
    }
    if (head) crumbs(work, lane, head);
    lane->turns = (bytes - head) / TURN * TURN;
    if (work->sums) {
      lane->keys = work->word_keys + lane->place / 8 % LINE_WORDS;
      lane->line_key = work->line_keys[lane->place / LINE_BYTES];
    }
    return 1;
  }
  return 0;
}

static int is_stopped(const struct work *work) {
  for (uint64_t n = 0; n < work->watch_count; n++) {
    uint64_t word = *work->watches[n].word;
    if (word != UINT64_MAX && word >= work->watches[n].least) return 1;
  }
  return 0;
}

/* Give the lane its next turns, of what it has or of what nobody has taken yet. */
static int refill(struct walk *walk, struct lane *lane) {
  const struct work *work = walk->work;
  while (!prepare(work, lane)) {
    if (walk->block == work->block_count || walk->flaw) return 0;
    if (is_stopped(work)) return walk->flaw = STOPPED, 0;
    const struct block *block = work->blocks + walk->block;
    const struct row *row = work->rows + walk->row;
    uint64_t bytes = row->bytes - walk->done;
    uint8_t *slot = block->extent + block->offset + row->at + walk->done;
    uint8_t *engine = 0;
    if (bytes > walk->cut) bytes = walk->cut;
    if (work->kind != SUM) engine = row->memory + block->engine * row->stride + walk->done;
    lane->to = work->kind == STORE ? slot : engine;
    lane->from = work->kind == STORE ? engine : slot;
    lane->sum = work->sums ? work->sums + block->sum : 0;
    lane->place = block->place + row->at + walk->done;
    lane->left = bytes;
    walk->done += bytes;
    if (walk->done < row->bytes) continue;
    walk->done = 0;
    if (++walk->row < work->row_count) continue;
    walk->row = 0;
    walk->block++;
  }
  return 1;
}

/* So many bytes for a lane that there are some for each, of little work too. */
static uint64_t cut_of(const struct work *work, uint64_t most) {
  uint64_t bytes = 0;
  for (uint64_t n = 0; n < work->row_count; n++) bytes += work->rows[n].bytes;
  bytes = bytes * work->block_count / most / LEAST_CUT * LEAST_CUT;
  return bytes < LEAST_CUT ? LEAST_CUT : bytes < MOST_CUT ? bytes : MOST_CUT;
}

INLINE int run_lanes(const struct work *work, turns *take, int copying, int summing, int far) {
  const int most = far ? FAR_LANES : LANES;
  struct walk walk = {work, 0, 0, 0, cut_of(work, (uint64_t)most), DONE};
  struct lane lanes[LANES];
  int count = 0;
  memset(lanes, 0, sizeof lanes);
  while (count < most && refill(&walk, lanes + count)) count++;
  while (count) {
    int together = count == most ? most : 1;
    uint64_t bytes = lanes[0].turns;
    for (int n = 1; n < together; n++)
      if (lanes[n].turns < bytes) bytes = lanes[n].turns;
    if (together == most) take(lanes, most, bytes, copying, summing, far);
    else take(lanes, 1, bytes, copying, summing, far);
    for (int n = together - 1; n >= 0; n--) {
      struct lane *lane = lanes + n;
      if (copying) lane->to += bytes;
      if (summing) lane->keys += bytes / 8;
      lane->from += bytes;
      lane->place += bytes;
      lane->left -= bytes;
      lane->turns -= bytes;
      if (!lane->turns && !refill(&walk, lane)) *lane = lanes[--count];
    }
  }
  return walk.flaw;
}

#define RUN(name, level, far, target)                                          \
  target static int run_##name(const struct work *work) {                     \
    if (work->kind == SUM) return run_lanes(work, turns_##level, 0, 1, far);   \
    if (work->sums) return run_lanes(work, turns_##level, 1, 1, far);          \
    return run_lanes(work, turns_##level, 1, 0, far);                          \
  }
RUN(plain, plain, 0, )
#if defined(__x86_64__)
RUN(avx512, avx512, 0, __attribute__((target("avx512f,avx512dq"))))
RUN(avx512_far, avx512, 1, __attribute__((target("avx512f,avx512dq"))))
RUN(avx2, avx2, 0, __attribute__((target("avx2"))))
RUN(avx2_far, avx2, 1, __attribute__((target("avx2"))))
#endif

/* -- bounds ------------------------------------------------------------------------------------ */

static int flaw_of(const struct work *work) {
  uint64_t reach = 0, engine = 0, start;
  for (uint64_t n = 0; n < work->row_count; n++) {
    const struct row *row = work->rows + n;
    if (!row->bytes || row->bytes > MOST || row->at > MOST) return BAD_ROW;
    if (work->sums && (row->bytes % 8 || row->at % 8)) return BAD_ROW;
    if (reach < row->at + row->bytes) reach = row->at + row->bytes;
  }
  for (uint64_t n = 0; n < work->block_count; n++) {
    const struct block *block = work->blocks + n;
    if (!block->extent || block->offset > MOST || block->place > MOST) return BAD_BLOCK;
    if (block->offset + reach > block->room) return BAD_BLOCK;
    if (block->engine > engine) engine = block->engine;
    if (!work->sums) continue;
    if (block->sum >= work->sum_count || block->place % 8) return BAD_SUM;
    if ((block->place + reach + LINE_BYTES - 1) / LINE_BYTES > work->line_count) return BAD_SUM;
  }
  for (uint64_t n = 0; n < work->row_count && work->kind != SUM; n++) {
    const struct row *row = work->rows + n;
    if (!row->memory || __builtin_mul_overflow(engine, row->stride, &start)) return OUTSIDE_MEMORY;
    if (start > MOST || start + row->bytes > row->room) return OUTSIDE_MEMORY;
  }
  return work->kind == SUM && !work->sums ? BAD_SUM : DONE;
}

/* -- what kvd/native calls --------------------------------------------------------------------- */

enum { PLAIN, AVX2, AVX512, FAR = 16 }; /* a level, and FAR beside it for that shape */

const char *kvd_source(void) { return KVD_SOURCE; }

/* The fastest level that processor and kernel have. Asked by cpuid: zig's __builtin_cpu_supports
 * knows nothing. */
static int level_here(void) {
#if defined(__x86_64__)
  const unsigned avx2 = 1u << 5, avx512 = 3u << 16; /* of leaf 7: F and DQ */
  const unsigned ymm = 6, zmm = 0xE6;               /* registers that the kernel keeps */
  unsigned a, b, c, d, kept;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27)) return PLAIN;
  __asm__("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return PLAIN;
  if ((b & avx512) == avx512 && (kept & zmm) == zmm) return AVX512;
  if ((b & avx2) && (kept & ymm) == ymm) return AVX2;
#endif
  return PLAIN;
}

/* Likewise, asked once: in a virtual machine cpuid takes as long as to sum up a megabyte. */
int kvd_level(void) {
  static int level = -1;
  if (level < 0) level = level_here();
  return level;
}

/* Whether FAR is this processor's shape: it is AMD's. */
int kvd_far(void) {
#if defined(__x86_64__)
  unsigned a, b = 0, c, d;
  return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx;
#else
  return 0;
#endif
}

/* Do it, or say what is wrong with it: then no byte was touched. STOPPED: some were. */
int kvd_run(const struct work *work, int level) {
  int far = level >= FAR, flaw;
  level -= far * FAR;
  flaw = level > kvd_level() || level < PLAIN ? NO_SUCH_LEVEL : flaw_of(work);
  if (flaw || !work->row_count) return flaw;
#if defined(__x86_64__)
  if (level > PLAIN) {
    if (far) flaw = level == AVX512 ? run_avx512_far(work) : run_avx2_far(work);
    else flaw = level == AVX512 ? run_avx512(work) : run_avx2(work);
    _mm_sfence();
    return flaw;
  }
#endif
  return run_plain(work);
}

/* Add the checksum of each part to its sum: `starts` are addresses, all parts have so many bytes. */
int kvd_sum(const struct work *keys, uint8_t *const *starts, uint64_t count, uint64_t bytes,
            int level) {
  struct row row = {0, 0, 0, bytes, 0};
  int flaw = DONE;
  for (uint64_t n = 0; n < count && !flaw; n++) {
    struct block block = {starts[n], bytes, 0, 0, 0, n};
    struct work work = *keys;
    work.kind = SUM;
    work.rows = &row, work.row_count = 1;
    work.blocks = &block, work.block_count = 1;
    flaw = kvd_run(&work, level);
  }
  return flaw;
}

/* -- between memory and a file ----------------------------------------------------------------- */

#define PARTS_AT_ONCE 256 /* in one call to the kernel, which takes up to 1024 */
#define MOST_MOVERS 128
#define MOVER_STACK (256 << 10)
#define STAGE_BYTES ((uint64_t)1 << 20)
#define HUGE_BYTES ((uint64_t)2 << 20)

/* Parts of memory that lie one after the other in a file, from `offset` on, and are moved by one
 * thread. `flaw`: 0, or the errno of what went wrong; EBADMSG: a part is not as it was. */
struct run { uint64_t first, count, offset, flaw; };

/* What all moves of one file share: so many calls to the kernel are under way at once, and the
 * stages that nobody uses now. */
struct turns {
  sem_t calls;
  pthread_mutex_t lock;
  void *mapped;
  uint64_t mapped_bytes, free_count;
  uint8_t *free[MOST_MOVERS];
};

/* `staged`: by way of stages, as far as there are some free. `sums`: a part's each. `wanted`, of a
 * write: what a part's sum must be; 0: nothing is known. */
struct move {
  const struct iovec *parts;
  uint64_t *sums;
  const uint64_t *wanted;
  struct run *runs;
  uint64_t run_count, movers, writes, staged;
  int64_t fd, deadline_ns;
  struct turns *turns;
  const uint64_t *word_keys, *line_keys;
  uint64_t line_count;
};

struct mover { const struct move *move; uint64_t *next; int level; };

/* So many calls, and stages for twice as many movers; none where there is no memory. */
struct turns *kvd_turns_begin(unsigned calls) {
  struct turns *turns = calloc(1, sizeof *turns);
  uint64_t stages = 2 * (uint64_t)calls < MOST_MOVERS ? 2 * (uint64_t)calls : MOST_MOVERS;
  if (!turns) return 0;
  turns->mapped_bytes = stages * STAGE_BYTES + HUGE_BYTES;
  turns->mapped =
      mmap(0, turns->mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (turns->mapped == MAP_FAILED || sem_init(&turns->calls, 0, calls)) {
    if (turns->mapped != MAP_FAILED) munmap(turns->mapped, turns->mapped_bytes);
    free(turns);
    return 0;
  }
  pthread_mutex_init(&turns->lock, 0);
  uint8_t *stage = (uint8_t *)turns->mapped + (-(uintptr_t)turns->mapped & (HUGE_BYTES - 1));
  madvise(stage, stages * STAGE_BYTES, MADV_HUGEPAGE); /* small pages do, too */
  for (uint64_t n = stages; n; n--) turns->free[turns->free_count++] = stage + (n - 1) * STAGE_BYTES;
  return turns;
}

void kvd_turns_end(struct turns *turns) {
  munmap(turns->mapped, turns->mapped_bytes);
  pthread_mutex_destroy(&turns->lock);
  sem_destroy(&turns->calls);
  free(turns);
}

static uint8_t *take_stage(struct turns *turns) {
  pthread_mutex_lock(&turns->lock);
  uint8_t *stage = turns->free_count ? turns->free[--turns->free_count] : 0;
  pthread_mutex_unlock(&turns->lock);
  return stage;
}

static void give_stage(struct turns *turns, uint8_t *stage) {
  pthread_mutex_lock(&turns->lock);
  turns->free[turns->free_count++] = stage;
  pthread_mutex_unlock(&turns->lock);
}

static int is_late(const struct move *move) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec >= move->deadline_ns;
}

/* The next call: every part, or as many as it takes, but for `done` bytes of the first. */
static ssize_t call_kernel(const struct move *move, const struct iovec *parts, uint64_t count,
                           uint64_t done, uint64_t offset) {
  struct iovec some[PARTS_AT_ONCE];
  int taken = (int)(count < PARTS_AT_ONCE ? count : PARTS_AT_ONCE);
  memcpy(some, parts, (size_t)taken * sizeof *some);
  some[0].iov_base = (uint8_t *)some[0].iov_base + done;
  some[0].iov_len -= done;
  if (move->writes) return pwritev((int)move->fd, some, taken, (off_t)offset);
  return preadv((int)move->fd, some, taken, (off_t)offset);
}

static uint64_t move_bytes(const struct move *move, const struct iovec *part, uint64_t count,
                           uint64_t offset) {
  const struct iovec *end = part + count;
  uint64_t done = 0;
  while (part < end) {
    while (sem_wait(&move->turns->calls)) continue;
    ssize_t moved = 0;
    int flaw = is_late(move) ? ETIMEDOUT : 0;
    if (!flaw) moved = call_kernel(move, part, (uint64_t)(end - part), done, offset);
    if (!flaw && moved <= 0) flaw = moved ? errno : EIO; /* the file ends too early */
    sem_post(&move->turns->calls);
    if (flaw == EINTR) continue;
    if (flaw) return (uint64_t)flaw;
    offset += (uint64_t)moved;
    done += (uint64_t)moved;
    while (part < end && done >= part->iov_len) done -= part++->iov_len;
  }
  return 0;
}

/* Work with a move's keys, on one sum. */
static struct work work_of(const struct move *move, uint64_t *sum) {
  struct work work;
  memset(&work, 0, sizeof work);
  work.word_keys = move->word_keys, work.line_keys = move->line_keys;
  work.line_count = move->line_count;
  work.sums = sum, work.sum_count = 1;
  return work;
}

/* Copy bytes of part `n`, from `done` on, from or to where they are staged, and sum them up. */
static int copy_staged(const struct move *move, uint64_t n, uint64_t done, uint64_t bytes,
                       uint8_t *staged, uint64_t kind, int level) {
  struct work work = work_of(move, move->sums + n);
  struct row row = {(uint8_t *)move->parts[n].iov_base + done, bytes, bytes, bytes, 0};
  struct block block = {staged, bytes, 0, 0, done, 0};
  work.kind = kind;
  work.rows = &row, work.row_count = 1;
  work.blocks = &block, work.block_count = 1;
  return kvd_run(&work, level) != 0;
}

/* Read a run by way of the stage. It stays in the processor's cache and lies in large pages, which
 * a disk fills sooner than it fills parts of small pages anywhere in memory; and a part's bytes are
 * summed up while they are copied to it. */
static uint64_t read_staged(const struct move *move, const struct run *run, int level,
                            uint8_t *stage) {
  uint64_t offset = run->offset, left = 0, staged = 0, used = 0;
  for (uint64_t n = run->first; n < run->first + run->count; n++) left += move->parts[n].iov_len;
  for (uint64_t n = run->first; n < run->first + run->count; n++) {
    uint64_t room = move->parts[n].iov_len, bytes;
    for (uint64_t done = 0; done < room; done += bytes, used += bytes) {
      if (used == staged) {
        struct iovec whole = {stage, left < STAGE_BYTES ? left : STAGE_BYTES};
        uint64_t flaw = move_bytes(move, &whole, 1, offset);
        if (flaw) return flaw;
        staged = whole.iov_len, used = 0;
        offset += staged, left -= staged;
      }
      bytes = staged - used < room - done ? staged - used : room - done;
      if (copy_staged(move, n, done, bytes, stage + used, LOAD, level)) return EINVAL;
    }
  }
  return 0;
}

/* Likewise, the other way. What is not as wanted may have been written in part. */
static uint64_t write_staged(const struct move *move, const struct run *run, int level,
                             uint8_t *stage) {
  uint64_t offset = run->offset, staged = 0;
  for (uint64_t n = run->first; n < run->first + run->count; n++) {
    uint64_t room = move->parts[n].iov_len, bytes;
    for (uint64_t done = 0; done < room; done += bytes) {
      if (staged == STAGE_BYTES) {
        struct iovec whole = {stage, staged};
        uint64_t flaw = move_bytes(move, &whole, 1, offset);
        if (flaw) return flaw;
        offset += staged, staged = 0;
      }
      bytes = STAGE_BYTES - staged < room - done ? STAGE_BYTES - staged : room - done;
      if (copy_staged(move, n, done, bytes, stage + staged, STORE, level)) return EINVAL;
      staged += bytes;
    }
    if (move->wanted && move->wanted[n] && move->wanted[n] != move->sums[n]) return EBADMSG;
  }
  struct iovec whole = {stage, staged};
  return staged ? move_bytes(move, &whole, 1, offset) : 0;
}

static uint64_t sum_parts(const struct move *move, const struct run *run, int level) {
  for (uint64_t n = run->first; n < run->first + run->count; n++) {
    uint8_t *start = move->parts[n].iov_base;
    struct work keys = work_of(move, move->sums + n);
    if (kvd_sum(&keys, &start, 1, move->parts[n].iov_len, level)) return EINVAL;
    if (move->wanted && move->wanted[n] && move->wanted[n] != move->sums[n]) return EBADMSG;
  }
  return 0;
}

static void *move_runs(void *given) {
  const struct mover *mover = given;
  const struct move *move = mover->move;
  uint8_t *stage = move->staged ? take_stage(move->turns) : 0;
  uint64_t next;
  while ((next = __atomic_fetch_add(mover->next, 1, __ATOMIC_RELAXED)) < move->run_count) {
    struct run *run = move->runs + next;
    if (stage) {
      run->flaw = move->writes ? write_staged(move, run, mover->level, stage)
                               : read_staged(move, run, mover->level, stage);
      continue;
    }
    run->flaw = move->writes ? sum_parts(move, run, mover->level) : 0;
    if (!run->flaw)
      run->flaw = move_bytes(move, move->parts + run->first, run->count, run->offset);
    if (!run->flaw && !move->writes) run->flaw = sum_parts(move, run, mover->level);
  }
  if (stage) give_stage(move->turns, stage);
  return 0;
}

/* Move every run: a read's parts are summed up once they have come, a write's before they go, and
 * then go only if they are what is wanted. When it returns nothing is under way any more. */
void kvd_move(const struct move *move, int level) {
  pthread_t threads[MOST_MOVERS];
  uint64_t next = 0, started = 0, most = move->movers < MOST_MOVERS ? move->movers : MOST_MOVERS;
  struct mover mover = {move, &next, level};
  pthread_attr_t small;
  if (most > move->run_count) most = move->run_count;
  if (most > 1 && !pthread_attr_init(&small)) {
    pthread_attr_setstacksize(&small, MOVER_STACK);
    while (started + 1 < most && !pthread_create(threads + started, &small, move_runs, &mover))
      started++;
    pthread_attr_destroy(&small);
  }
  move_runs(&mover); /* all of it, where no thread can be had */
  while (started) pthread_join(threads[--started], 0);
}

/* Tables of tags in shared memory, as kvd/pool/tag_table.py describes them: readers look at them
 * while we write, so a word is written whole, and a tag stays where it is. Each call takes the
 * words of a table of mask + 1 buckets, and says for each tag its bucket, or NOWHERE. */
#define BUCKET 8
#define TAGS_AHEAD 12 /* tags whose buckets are fetched before their turn */
#define NOWHERE ((int64_t)-1)

struct table { uint64_t *words; uint64_t mask; };

static inline uint64_t first_bucket(const struct table *table, uint64_t tag) {
  return tag & table->mask;
}

/* As in kvd_proto/tags.py. */
static inline uint64_t second_bucket(const struct table *table, uint64_t tag) {
  return ((tag >> 32) * 0x94D049BB133111EBull >> 20) & table->mask;
}

static inline void fetch_buckets(const struct table *table, const uint64_t *tags, uint64_t at,
                                 uint64_t count) {
  if (at < count) {
    __builtin_prefetch(&table->words[first_bucket(table, tags[at]) * BUCKET], 1);
    __builtin_prefetch(&table->words[second_bucket(table, tags[at]) * BUCKET], 1);
  }
}

/* The bucket's word that is this, BUCKET where none is; `held` of its words are. */
static inline int place_of(const uint64_t *bucket, uint64_t word, int *held) {
  int place = BUCKET, count = 0;
  for (int way = BUCKET - 1; way >= 0; way--)
    if (bucket[way] == word) place = way, count++;
  *held = count;
  return place;
}

void kvd_tags_insert(uint64_t *words, uint64_t mask, const uint64_t *tags, uint64_t count,
                     int64_t *went) {
  struct table table = {words, mask};
  for (uint64_t n = 0; n < TAGS_AHEAD; n++) fetch_buckets(&table, tags, n, count);
  for (uint64_t n = 0; n < count; n++) {
    uint64_t first = first_bucket(&table, tags[n]), second = second_bucket(&table, tags[n]);
    int free_first, free_second;
    int place = place_of(&words[first * BUCKET], 0, &free_first);
    int other = place_of(&words[second * BUCKET], 0, &free_second);
    fetch_buckets(&table, tags, n + TAGS_AHEAD, count);
    if (free_second > free_first) first = second, place = other;
    went[n] = place < BUCKET ? (int64_t)first : NOWHERE;
    if (place < BUCKET) __atomic_store_n(&words[first * BUCKET + place], tags[n], __ATOMIC_RELEASE);
  }
}

void kvd_tags_remove(uint64_t *words, uint64_t mask, const uint64_t *tags, uint64_t count,
                     int64_t *stood) {
  struct table table = {words, mask};
  for (uint64_t n = 0; n < TAGS_AHEAD; n++) fetch_buckets(&table, tags, n, count);
  for (uint64_t n = 0; n < count; n++) {
    int held;
    uint64_t bucket = first_bucket(&table, tags[n]);
    int place = place_of(&words[bucket * BUCKET], tags[n], &held);
    fetch_buckets(&table, tags, n + TAGS_AHEAD, count);
    if (place == BUCKET) {
      bucket = second_bucket(&table, tags[n]);
      place = place_of(&words[bucket * BUCKET], tags[n], &held);
    }
    stood[n] = place < BUCKET ? (int64_t)bucket : NOWHERE;
    if (place < BUCKET) __atomic_store_n(&words[bucket * BUCKET + place], 0, __ATOMIC_RELEASE);
  }
}

/* The index of kvd/core/model/index.py, which says what its arrays are: the slots of many keys, and
 * entries for new slots. A bucket has WAYS entries; of a round's buckets the first `split` have their
 * twins already. */
#define WAYS 4
#define KEYS_AHEAD 32 /* whose buckets, and then whose keys, are fetched together */
#define SLOT_BITS 0xFFFFFFFFull

/* Of a bucket's empty ways, as bits: how many, and the first of them. */
static const uint8_t EMPTY_WAYS[1 << WAYS] = {0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4};
static const uint8_t FIRST_EMPTY[1 << WAYS] = {0, 0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0};

struct index {
  uint64_t *entries;
  int64_t *places;
  const uint64_t *tags;
  const uint32_t *scopes;
  uint64_t round, split;
};

static inline uint64_t *bucket_of(const struct index *index, uint64_t hash) {
  uint64_t bucket = hash & (2 * index->round - 1);
  if (bucket >= index->round + index->split) bucket -= index->round;
  return index->entries + bucket * WAYS;
}

static inline uint64_t second_hash(uint64_t tag) { return tag * 0x9E3779B97F4A7C15ull >> 36; }

/* As in kvd_proto/tags.py. */
static inline uint64_t tag_of(const uint64_t *words, uint64_t width, uint64_t seed) {
  uint64_t tag = seed;
  for (uint64_t n = 0; n < width; n++) {
    tag = (tag + 0x9E3779B97F4A7C15ull) ^ words[n];
    tag = (tag ^ tag >> 30) * 0xBF58476D1CE4E5B9ull;
    tag = (tag ^ tag >> 27) * 0x94D049BB133111EBull;
    tag ^= tag >> 31;
  }
  return tag ? tag : 1;
}

/* The slot + 1 of an entry with this tag's high half; 0: it is none. */
static inline uint64_t slot_of(uint64_t entry, uint64_t tag) {
  return entry >> 32 == tag >> 32 ? entry & SLOT_BITS : 0;
}

void kvd_index_find(const struct index *index, const uint64_t *keys, uint64_t width,
                    const uint64_t *words, uint64_t count, uint64_t seed, uint64_t scope,
                    uint64_t *tags, int64_t *slots) {
  for (uint64_t start = 0; start < count; start += KEYS_AHEAD) {
    uint64_t end = start + KEYS_AHEAD < count ? start + KEYS_AHEAD : count;
    const uint64_t *both[KEYS_AHEAD][2];
    for (uint64_t n = start; n < end; n++) {
      tags[n] = tag_of(words + n * width, width, seed);
      both[n - start][0] = bucket_of(index, tags[n]);
      both[n - start][1] = bucket_of(index, second_hash(tags[n]));
      for (int which = 0; which < 2; which++) __builtin_prefetch(both[n - start][which]);
    }
    for (uint64_t n = start; n < end; n++)
      for (int way = 0; way < 2 * WAYS; way++) {
        uint64_t slot = slot_of(both[n - start][way / WAYS][way % WAYS], tags[n]);
        if (!slot) continue;
        __builtin_prefetch(keys + (slot - 1) * width);
        __builtin_prefetch(index->scopes + slot - 1);
      }
    for (uint64_t n = start; n < end; n++) {
      slots[n] = NOWHERE;
      for (int way = 0; way < 2 * WAYS; way++) {
        uint64_t slot = slot_of(both[n - start][way / WAYS][way % WAYS], tags[n]);
        if (slot && index->scopes[slot - 1] == scope &&
            !memcmp(keys + (slot - 1) * width, words + n * width, width * sizeof *words))
          slots[n] = (int64_t)slot - 1;
      }
    }
  }
}

/* How many found both their buckets full: those slots are the first in `full`. */
uint64_t kvd_index_insert(const struct index *index, const int64_t *slots, uint64_t count,
                          int64_t *full) {
  uint64_t left = 0;
  for (uint64_t start = 0; start < count; start += KEYS_AHEAD) {
    uint64_t end = start + KEYS_AHEAD < count ? start + KEYS_AHEAD : count;
    uint64_t *both[KEYS_AHEAD][2];
    for (uint64_t n = start; n < end; n++) {
      uint64_t tag = index->tags[slots[n]];
      both[n - start][0] = bucket_of(index, tag);
      both[n - start][1] = bucket_of(index, second_hash(tag));
      for (int which = 0; which < 2; which++) __builtin_prefetch(both[n - start][which], 1);
      __builtin_prefetch(index->places + slots[n], 1);
    }
    for (uint64_t n = start; n < end; n++) {
      /* Without a branch: which ways are empty can't be foreseen. */
      uint32_t empty[2];
      for (int which = 0; which < 2; which++) {
        const uint64_t *bucket = both[n - start][which];
        empty[which] = !bucket[0] | !bucket[1] << 1 | !bucket[2] << 2 | !bucket[3] << 3;
      }
      int which = EMPTY_WAYS[empty[1]] > EMPTY_WAYS[empty[0]];
      uint64_t *entry = both[n - start][which] + FIRST_EMPTY[empty[which]];
      index->places[slots[n]] = empty[which] ? entry - index->entries : NOWHERE;
      if (empty[which])
        *entry = (index->tags[slots[n]] & ~SLOT_BITS) | ((uint64_t)slots[n] + 1);
      else
        full[left++] = slots[n];
    }
  }
  return left;
}

/* The ghosts of kvd/core/policy/ghosts.py: a bucket is the places of GHOST_WAYS ghosts, 0 where there
 * is none, and then their tags, whose highest bit is a mark. */
#define GHOST_WAYS 8
#define GHOST_WORDS (2 * GHOST_WAYS)
#define GHOST_MARK (1ull << 63)
#define CHOSEN UINT64_MAX /* no ghost's place */

static inline uint64_t ghost_bucket(uint64_t tag, uint64_t shift) {
  return (tag * 0x9E3779B97F4A7C15ull >> shift) * GHOST_WORDS;
}

/* The number of each tag's ghost: where its place is. */
void kvd_ghosts_find(const uint64_t *table, uint64_t shift, const uint64_t *tags, uint64_t count,
                     int64_t *numbers) {
  for (uint64_t start = 0; start < count; start += KEYS_AHEAD) {
    uint64_t end = start + KEYS_AHEAD < count ? start + KEYS_AHEAD : count;
    for (uint64_t n = start; n < end; n++)
      __builtin_prefetch(table + ghost_bucket(tags[n], shift) + GHOST_WAYS);
    for (uint64_t n = start; n < end; n++) {
      const uint64_t *places = table + ghost_bucket(tags[n], shift);
      unsigned alike = 0;
      for (int way = 0; way < GHOST_WAYS; way++)
        alike |= (unsigned)!((places[GHOST_WAYS + way] ^ tags[n]) & ~GHOST_MARK) << way;
      numbers[n] = NOWHERE;
      for (int way = 0; alike >> way && numbers[n] == NOWHERE; way++)
        if (alike >> way & 1 && places[way]) numbers[n] = places + way - table;
    }
  }
}

/* A number for each tag, which is written there: of its bucket's that were not chosen yet the one
 * with the smallest place. */
void kvd_ghosts_place(uint64_t *table, uint64_t shift, const uint64_t *tags, uint64_t count,
                      int64_t *numbers, uint64_t *places) {
  for (uint64_t start = 0; start < count; start += KEYS_AHEAD) {
    uint64_t end = start + KEYS_AHEAD < count ? start + KEYS_AHEAD : count;
    for (uint64_t n = start; n < end; n++) {
      __builtin_prefetch(table + ghost_bucket(tags[n], shift), 1);
      __builtin_prefetch(table + ghost_bucket(tags[n], shift) + GHOST_WAYS, 1);
    }
    for (uint64_t n = start; n < end; n++) {
      uint64_t *bucket = table + ghost_bucket(tags[n], shift), *least = bucket;
      for (int way = 1; way < GHOST_WAYS; way++)
        if (bucket[way] < *least) least = bucket + way;
      places[n] = *least;
      numbers[n] = *least == CHOSEN ? NOWHERE : least - table;
      if (*least == CHOSEN) continue;
      *least = CHOSEN;
      least[GHOST_WAYS] = tags[n] & ~GHOST_MARK;
    }
  }
  for (uint64_t n = 0; n < count; n++)
    if (numbers[n] != NOWHERE) table[numbers[n]] = places[n];
}

/* -- lists of copies for the copy engines of a GPU ---------------------------------------------- *
 *
 * In Python the list of one small block's copies takes longer than these copies: a mover that has
 * slept finds no cache warm. The functions of CUDA's driver are the caller's: nothing here links to
 * it. See kvd/mover/cuda/copiers.py for which way is taken when. */
#define NO_BLOCK UINT32_MAX /* the engine block that is none */
#define MOST_BATCH 512
#define CUDA_SOURCE_IN_ORDER 1 /* CU_MEMCPY_SRC_ACCESS_ORDER_STREAM */
#define CUDA_SOURCE_ANY 3
#define CUDA_OVERLAP 1 /* CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE */
#define CUDA_HOST 1 /* CU_MEMORYTYPE_HOST */
#define CUDA_DEVICE 2

/* Evenly spaced stretches, `height` of them, for a span of engine blocks: kvd/mover/cuda/runs.py
 * says more of them. Only for spans of at least `least` blocks. */
struct gpu_row {
  int64_t region, device, host, stride, width, device_pitch, host_pitch, height, least;
};

struct gpu_run { uint64_t host, device, host_pitch, device_pitch, width, height; };

struct gpu_plan {
  const struct gpu_row *together, *alone;
  uint64_t together_count, alone_count;
  const uint64_t *regions; /* device address of each */
  const uint64_t *mappings; /* address of each extent, by its number */
  uint64_t block_bytes, blocks_per_slot;
  const uint32_t *extents; /* of each slot */
  const uint64_t *offsets; /* of each slot, in its extent */
  const uint32_t *engine; /* blocks of each slot */
  uint64_t slots;
  struct gpu_run *runs; /* room for a run of every row for every engine block */
};

static uint64_t gpu_host(const struct gpu_plan *plan, uint64_t block) {
  uint64_t slot = block / plan->blocks_per_slot;
  return plan->mappings[plan->extents[slot]] + plan->offsets[slot] +
         block % plan->blocks_per_slot * plan->block_bytes;
}

/* Whether an engine block goes on where the one before it ends, on both sides. Extents whose
 * mappings touch are two all the same: no copy may run across two registrations. */
static int gpu_goes_on(const struct gpu_plan *plan, uint64_t block) {
  uint64_t slot = block / plan->blocks_per_slot, before = (block - 1) / plan->blocks_per_slot;
  return plan->engine[block] != NO_BLOCK && plan->engine[block - 1] + 1 == plan->engine[block] &&
         plan->extents[slot] == plan->extents[before] &&
         gpu_host(plan, block - 1) + plan->block_bytes == gpu_host(plan, block);
}

static struct gpu_run gpu_run_of(const struct gpu_plan *plan, const struct gpu_row *row,
                                 uint64_t first, uint64_t blocks) {
  struct gpu_run run;
  uint64_t height = (uint64_t)row->height * blocks, width = (uint64_t)row->width;
  int flat = row->device_pitch == row->width && row->host_pitch == row->width;
  run.host = gpu_host(plan, first) + (uint64_t)row->host;
  run.device = plan->regions[row->region] + (uint64_t)row->device +
               plan->engine[first] * (uint64_t)row->stride;
  run.width = flat ? width * height : width;
  run.height = flat ? 1 : height;
  run.host_pitch = run.height == 1 ? run.width : (uint64_t)row->host_pitch;
  run.device_pitch = run.height == 1 ? run.width : (uint64_t)row->device_pitch;
  return run;
}

/* Writes the runs of the slots' engine blocks; how many. Null blocks have none. */
uint64_t kvd_gpu_plan(const struct gpu_plan *plan) {
  uint64_t count = 0, end = plan->slots * plan->blocks_per_slot, next;
  for (uint64_t first = 0; first < end; first = next) {
    next = first + 1;
    if (plan->engine[first] == NO_BLOCK) continue;
    while (next < end && gpu_goes_on(plan, next)) next++;
    int64_t blocks = (int64_t)(next - first);
    for (uint64_t n = 0; n < plan->together_count; n++)
      if (blocks >= plan->together[n].least)
        plan->runs[count++] = gpu_run_of(plan, plan->together + n, first, (uint64_t)blocks);
    for (uint64_t n = 0; n < plan->alone_count; n++)
      for (uint64_t block = first; block < next && blocks < plan->alone[n].least; block++)
        plan->runs[count++] = gpu_run_of(plan, plan->alone + n, block, 1);
  }
  return count;
}

/* CUmemcpyAttributes and CUDA_MEMCPY2D, as cuda.h has them. */
struct cuda_attributes { int order, hints[4]; unsigned flags; };
struct cuda_2d {
  size_t from_x, from_y; int from_type; const void *from_host; uint64_t from_device;
  void *from_array; size_t from_pitch;
  size_t to_x, to_y; int to_type; void *to_host; uint64_t to_device;
  void *to_array; size_t to_pitch;
  size_t width, height;
};

struct gpu_submission {
  const struct gpu_run *runs;
  uint64_t count;
  uint64_t run, row, byte; /* where to go on */
  uint64_t is_store;
  void *stream;
  /* cuMemcpyBatchAsync, or none; whether it is the one that tells which copy was wrong */
  void *batch;
  uint64_t tells;
  void *strided, *to_device, *to_host; /* cuMemcpy2DAsync, cuMemcpyHtoDAsync, cuMemcpyDtoHAsync */
  uint64_t batch_copies, narrow_bytes, least_steps, most_pitch;
  uint64_t copied; /* bytes, so far */
  const char *failed; /* the function that refused */
  /* A batch that is being filled. */
  uint64_t filled, to[MOST_BATCH], from[MOST_BATCH], bytes[MOST_BATCH];
};

typedef int cuda_batch(uint64_t *to, uint64_t *from, uint64_t *bytes, size_t count,
                       struct cuda_attributes *attributes, size_t *first, size_t kinds,
                       void *stream);
typedef int cuda_batch_telling(uint64_t *to, uint64_t *from, uint64_t *bytes, size_t count,
                               struct cuda_attributes *attributes, size_t *first, size_t kinds,
                               size_t *failed, void *stream);
typedef int cuda_strided(const struct cuda_2d *copy, void *stream);
typedef int cuda_to_device(uint64_t to, const void *from, size_t bytes, void *stream);
typedef int cuda_to_host(void *to, uint64_t from, size_t bytes, void *stream);

/* A store's source is the engine's memory, read where its turn in the stream comes. A load's are
 * pinned slots, which nothing writes meanwhile: the driver may read them as early as it likes. */
static int gpu_flush(struct gpu_submission *work) {
  struct cuda_attributes attributes = {work->is_store ? CUDA_SOURCE_IN_ORDER : CUDA_SOURCE_ANY,
                                       {0}, CUDA_OVERLAP};
  size_t first = 0, failed = 0, count = work->filled;
  work->filled = 0;
  if (!count) return 0;
  work->failed = "cuMemcpyBatchAsync";
  if (work->tells)
    return ((cuda_batch_telling *)work->batch)(work->to, work->from, work->bytes, count,
                                               &attributes, &first, 1, &failed, work->stream);
  return ((cuda_batch *)work->batch)(work->to, work->from, work->bytes, count, &attributes, &first,
                                     1, work->stream);
}

static int gpu_stretch(struct gpu_submission *work, uint64_t host, uint64_t device,
                       uint64_t bytes) {
  if (work->batch) {
    uint64_t n = work->filled++;
    work->to[n] = work->is_store ? host : device;
    work->from[n] = work->is_store ? device : host;
    work->bytes[n] = bytes;
    return work->filled == work->batch_copies ? gpu_flush(work) : 0;
  }
  if (work->is_store) {
    work->failed = "cuMemcpyDtoHAsync_v2";
    return ((cuda_to_host *)work->to_host)((void *)host, device, bytes, work->stream);
  }
  work->failed = "cuMemcpyHtoDAsync_v2";
  return ((cuda_to_device *)work->to_device)(device, (const void *)host, bytes, work->stream);
}

static int gpu_strided(struct gpu_submission *work, const struct gpu_run *run, uint64_t rows) {
  uint64_t host = run->host + work->row * run->host_pitch;
  uint64_t device = run->device + work->row * run->device_pitch;
  struct cuda_2d copy = {0};
  copy.width = run->width;
  copy.height = rows;
  if (work->is_store) {
    copy.from_type = CUDA_DEVICE, copy.from_device = device, copy.from_pitch = run->device_pitch;
    copy.to_type = CUDA_HOST, copy.to_host = (void *)host, copy.to_pitch = run->host_pitch;
  } else {
    copy.from_type = CUDA_HOST, copy.from_host = (const void *)host;
    copy.from_pitch = run->host_pitch;
    copy.to_type = CUDA_DEVICE, copy.to_device = device, copy.to_pitch = run->device_pitch;
  }
  work->failed = "cuMemcpy2DAsync_v2";
  return ((cuda_strided *)work->strided)(&copy, work->stream);
}

/* Two stretches of a run may overlap in the engine's memory, where a load's bytes are the same for
 * both; as one strided copy the driver would refuse them. */
static int gpu_is_strided(const struct gpu_submission *work, const struct gpu_run *run) {
  uint64_t host = run->host_pitch, device = run->device_pitch;
  if (host < run->width || device < run->width) return 0;
  if (host > work->most_pitch || device > work->most_pitch) return 0;
  if (!work->batch) return run->height > 1;
  return run->height >= work->least_steps && run->width < work->narrow_bytes;
}

/* Queues copies of at most so many bytes, a multiple of a word, from where the last call ended. The
 * driver's error, 0: none; what was queued before it is. */
int kvd_gpu_submit(struct gpu_submission *work, uint64_t most) {
  uint64_t left = most;
  int error = 0;
  while (!error && left && work->run < work->count) {
    const struct gpu_run *run = work->runs + work->run;
    uint64_t bytes, rows = 1;
    if (!work->byte && gpu_is_strided(work, run) && run->width <= left) {
      uint64_t fit = left / run->width;
      rows = run->height - work->row < fit ? run->height - work->row : fit;
      bytes = rows * run->width;
      error = gpu_strided(work, run, rows);
    } else {
      bytes = run->width - work->byte;
      /* Cut is only what is too large for a whole call. */
      if (bytes > left && (work->byte || run->width > most)) bytes = left;
      if (bytes > left) break;
      error = gpu_stretch(work, run->host + work->row * run->host_pitch + work->byte,
                          run->device + work->row * run->device_pitch + work->byte, bytes);
      work->byte += bytes;
      if (work->byte < run->width) rows = 0;
      else work->byte = 0;
    }
    left -= bytes;
    work->copied += bytes;
    work->row += rows;
    if (work->row == run->height) work->row = 0, work->run++;
  }
  return error ? error : gpu_flush(work);
}

/* Whoever closes a TCP socket for the last time waits as long as SO_LINGER says, which is what who
 * gave it chose, also where it lies unread in another socket. Linux spares only a thread that ends.
 * So one takes the descriptors along: it has a table of its own, in which only these are open. */
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#define UNSHARE 2u /* CLOSE_RANGE_UNSHARE, which is let through where unshare(2) is not */
#define END_STACK (256 << 10)

struct end { const int *fds; uint64_t count; int error; sem_t took_them, is_last; };

static void *end_with(void *given) {
  struct end *end = given;
  unsigned next = 0;
  end->error = syscall(SYS_close_range, end->fds[end->count - 1] + 1u, ~0u, UNSHARE) ? errno : 0;
  for (uint64_t n = 0; !end->error && n < end->count; n++) {
    if ((unsigned)end->fds[n] > next) syscall(SYS_close_range, next, end->fds[n] - 1u, 0);
    next = end->fds[n] + 1u;
  }
  sem_post(&end->took_them);
  while (sem_wait(&end->is_last)) {}
  sem_destroy(&end->took_them), sem_destroy(&end->is_last);
  free(end);
  return 0;
}

/* Closes these descriptors, which rise and are at least one, by the end of a thread. Else an errno,
 * and nothing is done. The thread gets no signal: whom it would wake up is told through a
 * descriptor. */
int kvd_close(const int *fds, uint64_t count) {
  struct end *end = calloc(1, sizeof *end);
  pthread_attr_t how;
  pthread_t thread;
  sigset_t all, before;
  if (!end) return ENOMEM;
  end->fds = fds, end->count = count;
  sem_init(&end->took_them, 0, 0), sem_init(&end->is_last, 0, 0);
  pthread_attr_init(&how);
  pthread_attr_setdetachstate(&how, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&how, END_STACK);
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(&thread, &how, end_with, end);
  pthread_sigmask(SIG_SETMASK, &before, 0);
  pthread_attr_destroy(&how);
  if (error) {
    sem_destroy(&end->took_them), sem_destroy(&end->is_last);
    free(end);
    return error;
  }
  while (sem_wait(&end->took_them)) {}
  error = end->error;
  for (uint64_t n = 0; !error && n < count; n++) close(fds[n]);
  sem_post(&end->is_last);
  return error;
}
