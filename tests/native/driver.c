/* Random work for copies.c on memory of malloc, each allocation ending where its bytes do: whatever
 * touches a byte after a stretch is found by the sanitizers that this is built with. Bytes and sums
 * are compared with what a plain loop makes of them. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "../../kvd/native/copies.c"

enum { ROWS = 3, BLOCKS = 12, LINES = 8 };

static uint64_t state = 1, word_keys[LINE_WORDS], line_keys[LINES];

static uint64_t draw(uint64_t below) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (state >> 33) % below;
}

static uint8_t *noise(uint64_t bytes, uint64_t skew, uint8_t **allocation) {
  *allocation = malloc(skew + bytes);
  for (uint64_t at = 0; at < skew + bytes; at++) (*allocation)[at] = (uint8_t)draw(256);
  return *allocation + skew;
}

static void check(int right, const char *what) {
  if (!right) printf("wrong: %s\n", what), exit(1);
}

static void one(int level) {
  uint64_t kind = draw(3), unit = kind == SUM || draw(2) ? 8 : 1, total = 0;
  uint64_t row_count = 1 + draw(ROWS), block_count = 1 + draw(BLOCKS);
  uint64_t sums[BLOCKS] = {0}, wanted[BLOCKS] = {0};
  uint8_t *kept[ROWS + BLOCKS];
  struct row rows[ROWS];
  struct block blocks[BLOCKS];
  for (uint64_t r = 0; r < row_count; r++) {
    uint64_t bytes = unit * (1 + draw(draw(2) ? 20000 / unit : 40)), skew = draw(64);
    uint8_t *memory = noise(bytes * block_count, skew, &kept[r]);
    rows[r] = (struct row){memory, bytes * block_count, bytes, bytes, total};
    total += bytes;
  }
  for (uint64_t b = 0; b < block_count; b++) {
    uint64_t offset = unit * draw(20), place = unit == 8 ? 8 * draw(100) : 0;
    uint8_t *extent = noise(offset + total, 0, &kept[ROWS + b]);
    blocks[b] = (struct block){extent, offset + total, offset, block_count - 1 - b, place, b};
  }
  struct work work = {rows, blocks, row_count, block_count, kind,
                    unit == 8 ? sums : 0, word_keys, line_keys, block_count, LINES};
  check(kvd_run(&work, level) == DONE, "sound work is refused");
  for (uint64_t b = 0; b < block_count; b++)
    for (uint64_t r = 0; r < row_count; r++) {
      const uint8_t *slot = blocks[b].extent + blocks[b].offset + rows[r].at;
      const uint8_t *engine = rows[r].memory + blocks[b].engine * rows[r].stride;
      if (kind != SUM) check(!memcmp(slot, engine, rows[r].bytes), "bytes");
      for (uint64_t at = 0; unit == 8 && at < rows[r].bytes; at += 8) {
        uint64_t word, place = (blocks[b].place + rows[r].at + at) / 8;
        memcpy(&word, slot + at, 8);
        wanted[b] += word * word_keys[place % LINE_WORDS] * line_keys[place / LINE_WORDS];
      }
    }
  check(!memcmp(sums, wanted, sizeof sums), "sums");
  for (uint64_t r = 0; r < row_count; r++) free(kept[r]);
  for (uint64_t b = 0; b < block_count; b++) free(kept[ROWS + b]);
}

/* A table without a byte to spare, tags of which some repeat, and a plain count of what stands. */
static void tag_table(void) {
  enum { MOST_TAGS = 200 };
  uint64_t buckets = (uint64_t)1 << draw(6), count = draw(MOST_TAGS), standing = 0;
  uint64_t *words = calloc(buckets, 8 * BUCKET), *tags = malloc(8 * count);
  int64_t *went = malloc(8 * count);
  for (uint64_t n = 0; n < count; n++) tags[n] = n && !draw(8) ? tags[draw(n)] : 1 + draw(1u << 31);
  kvd_tags_insert(words, buckets - 1, tags, count, went);
  for (uint64_t n = 0; n < count; n++) standing += went[n] != NOWHERE;
  for (uint64_t n = 0; n < buckets * BUCKET; n++) standing -= words[n] != 0;
  check(!standing, "tags that were inserted");
  for (uint64_t n = 0; n < count; n++) standing += went[n] != NOWHERE;
  kvd_tags_remove(words, buckets - 1, tags, count, went);
  for (uint64_t n = 0; n < count; n++) standing -= went[n] != NOWHERE;
  for (uint64_t n = 0; n < buckets * BUCKET; n++) standing |= words[n];
  check(!standing, "tags that were removed");
  free(words), free(tags), free(went);
}

/* An index without a byte to spare, in the midst of a round: what has a place is found, under its
 * own key and scope. */
static void key_index(void) {
  enum { SLOTS = 150, WIDTH = 3, ROUND = 8 };
  uint64_t split = draw(ROUND), seed = draw(1u << 31), left, standing = 0;
  uint64_t *entries = calloc((ROUND + split) * WAYS, 8), *keys = malloc(8 * WIDTH * SLOTS);
  uint64_t *tags = malloc(8 * SLOTS), *told = malloc(8 * SLOTS);
  uint32_t *scopes = malloc(4 * SLOTS);
  int64_t *places = malloc(8 * SLOTS), *slots = malloc(8 * SLOTS), *found = malloc(8 * SLOTS);
  struct index index = {entries, places, tags, scopes, ROUND, split};
  for (uint64_t n = 0; n < WIDTH * SLOTS; n++) keys[n] = draw(1u << 31);
  for (uint64_t n = 0; n < SLOTS; n++) {
    tags[n] = tag_of(keys + n * WIDTH, WIDTH, seed), scopes[n] = n % 2;
    slots[n] = (int64_t)n;
  }
  uint64_t count = draw(SLOTS);
  left = kvd_index_insert(&index, slots, count, found);
  for (uint64_t n = 0; n < (ROUND + split) * WAYS; n++) standing += entries[n] != 0;
  check(standing + left == count, "slots that were put in");
  for (uint32_t scope = 0; scope < 2; scope++) {
    kvd_index_find(&index, keys, WIDTH, keys, SLOTS, seed, scope, told, found);
    for (uint64_t n = 0; n < SLOTS; n++) {
      int is_there = n < count && scopes[n] == scope && places[n] != NOWHERE;
      check(told[n] == tags[n] && found[n] == (is_there ? (int64_t)n : NOWHERE), "a key's slot");
    }
  }
  free(entries), free(keys), free(tags), free(told), free(scopes);
  free(places), free(slots), free(found);
}

/* A table of ghosts without a byte to spare: each tag has a place of its own or its bucket is full of
 * chosen ones, places stay as they were, and what has a place is found. */
static void ghosts(void) {
  enum { TAGS = 40 };
  uint64_t bits = 1 + draw(2), words = (uint64_t)GHOST_WORDS << bits, count = draw(TAGS);
  uint64_t *table = malloc(8 * words), *tags = malloc(8 * count), *places = malloc(8 * count);
  uint64_t *before = malloc(8 * words);
  int64_t *numbers = malloc(8 * count), *found = malloc(8 * count);
  for (uint64_t n = 0; n < words; n++)
    table[n] = n % GHOST_WORDS < GHOST_WAYS ? draw(4) : draw(4) ? GHOST_MARK : ~GHOST_MARK;
  for (uint64_t n = 0; n < count; n++) tags[n] = (uint64_t)draw(1u << 31) << 33 | (n + 1);
  memcpy(before, table, 8 * words);
  kvd_ghosts_place(table, 64 - bits, tags, count, numbers, places);
  kvd_ghosts_find(table, 64 - bits, tags, count, found);
  for (uint64_t n = 0; n < count; n++) {
    uint64_t bucket = ghost_bucket(tags[n], 64 - bits), alike = 0;
    for (uint64_t m = 0; m < n; m++) {
      check(numbers[n] == NOWHERE || numbers[n] != numbers[m], "one place for two ghosts");
      alike += ghost_bucket(tags[m], 64 - bits) == bucket;
    }
    check((numbers[n] == NOWHERE) == (alike >= GHOST_WAYS), "a ghost without a place");
    if (numbers[n] == NOWHERE) continue;
    uint64_t place = table[numbers[n]];
    check((uint64_t)numbers[n] - bucket < GHOST_WAYS, "a ghost in another's bucket");
    check(table[numbers[n] + GHOST_WAYS] == (tags[n] & ~GHOST_MARK), "a ghost's tag");
    check(found[n] == (place ? numbers[n] : NOWHERE), "a ghost that is found");
  }
  for (uint64_t n = 0; n < words; n++)
    check(n % GHOST_WORDS >= GHOST_WAYS || table[n] == before[n], "a place that was changed");
  free(table), free(tags), free(places), free(before), free(numbers), free(found);
}

/* Parts of memory to a file and back, on more threads than there are stages. */
static void to_a_file_and_back(int level) {
  enum { RUNS = 4, PARTS = 5 };
  FILE *file = tmpfile();
  struct turns *turns = kvd_turns_begin(1);
  struct iovec parts[RUNS * PARTS], back[RUNS * PARTS];
  uint64_t sums[RUNS * PARTS] = {0}, found[RUNS * PARTS] = {0}, offset = 0;
  struct run runs[RUNS];
  uint8_t *kept[2 * RUNS * PARTS];
  check(file && turns, "nowhere to move to");
  for (uint64_t n = 0; n < RUNS * PARTS; n++) {
    uint64_t bytes = 8 * (1 + draw(draw(8) ? 500 : 8000));
    parts[n] = (struct iovec){noise(bytes, 0, &kept[n]), bytes};
    back[n] = (struct iovec){noise(bytes, 0, &kept[RUNS * PARTS + n]), bytes};
    if (n % PARTS == 0) runs[n / PARTS] = (struct run){n, PARTS, offset, 99};
    offset += bytes;
  }
  struct move move = {parts, sums, 0, runs, RUNS, RUNS, 1, draw(2), fileno(file), INT64_MAX, turns,
                      word_keys, line_keys, LINES};
  kvd_move(&move, level);
  for (int n = 0; n < RUNS; n++) check(!runs[n].flaw, "a write");
  move.parts = back, move.sums = found, move.writes = 0, move.staged = draw(2);
  kvd_move(&move, level);
  for (int n = 0; n < RUNS; n++) check(!runs[n].flaw, "a read");
  check(!memcmp(sums, found, sizeof sums), "sums of a file's parts");
  for (int n = 0; n < RUNS * PARTS; n++) {
    check(!memcmp(parts[n].iov_base, back[n].iov_base, parts[n].iov_len), "a file's bytes");
    free(kept[n]), free(kept[RUNS * PARTS + n]);
  }
  kvd_turns_end(turns);
  fclose(file);
}

/* -- a GPU's lists of copies, on a driver whose device is memory of malloc -- */

enum { PIECES = 3, ENGINE_BLOCKS = 9, SLOTS = 7, EXTENTS = 3 };

struct piece { int64_t region, base, stride, bytes, step, count, at; };

static uint64_t calls, refuse_at;

static int is_refused(void) { return calls++ == refuse_at; }

static int batch(uint64_t *to, uint64_t *from, uint64_t *bytes, size_t count,
                 struct cuda_attributes *attributes, size_t *first, size_t kinds, void *stream) {
  check(stream == &calls && !*first && kinds == 1 && attributes->flags == 1, "a batch's form");
  if (is_refused()) return 1;
  for (size_t n = 0; n < count; n++) memcpy((void *)to[n], (void *)from[n], bytes[n]);
  return 0;
}

static int batch_telling(uint64_t *to, uint64_t *from, uint64_t *bytes, size_t count,
                         struct cuda_attributes *attributes, size_t *first, size_t kinds,
                         size_t *failed, void *stream) {
  *failed = 0;
  return batch(to, from, bytes, count, attributes, first, kinds, stream);
}

static int strided(const struct cuda_2d *copy, void *stream) {
  const uint8_t *from = copy->from_type == 1 ? copy->from_host : (void *)copy->from_device;
  uint8_t *to = copy->to_type == 1 ? copy->to_host : (void *)copy->to_device;
  check(stream == &calls && copy->from_type + copy->to_type == 3, "a strided copy's form");
  check(copy->from_pitch >= copy->width && copy->to_pitch >= copy->width, "a pitch");
  if (is_refused()) return 1;
  for (size_t row = 0; row < copy->height; row++)
    memcpy(to + row * copy->to_pitch, from + row * copy->from_pitch, copy->width);
  return 0;
}

static int to_device(uint64_t to, const void *from, size_t bytes, void *stream) {
  check(stream == &calls, "a stream");
  if (is_refused()) return 1;
  memcpy((void *)to, from, bytes);
  return 0;
}

static int to_host(void *to, uint64_t from, size_t bytes, void *stream) {
  return to_device((uint64_t)to, (const void *)from, bytes, stream);
}

static uint64_t rows_of(const struct piece *piece, int64_t block_bytes, struct gpu_row *together,
                        struct gpu_row *alone) {
  for (int64_t n = 0; n < piece->count; n++)
    together[n] = (struct gpu_row){piece->region, piece->base + n * piece->step,
                                   piece->at + n * piece->bytes, piece->stride, piece->bytes,
                                   piece->stride, block_bytes, 1, piece->count};
  *alone = (struct gpu_row){piece->region, piece->base, piece->at, piece->stride, piece->bytes,
                            piece->step, piece->bytes, piece->count, piece->count};
  return piece->count > 1;
}

static void gpu_lists(void) {
  struct piece pieces[PIECES];
  struct gpu_row together[PIECES * 6], alone[PIECES];
  uint8_t *device[PIECES], *extents[EXTENTS], *kept[PIECES + EXTENTS];
  uint64_t regions[PIECES], mappings[EXTENTS], ends[PIECES], offsets[SLOTS], nth_of[EXTENTS] = {0};
  uint64_t piece_count = 1 + draw(PIECES), per = 1 + draw(3), slots = 1 + draw(SLOTS);
  uint64_t together_count = 0, alone_count = 0, wrong_calls = draw(4) ? UINT64_MAX : draw(5);
  int64_t block_bytes = 0;
  uint32_t numbers[SLOTS], engine[SLOTS * 3];
  for (uint64_t p = 0; p < piece_count; p++) {
    struct piece *piece = pieces + p;
    *piece = (struct piece){.region = (int64_t)p, .base = 8 * (int64_t)draw(5), .at = block_bytes};
    piece->bytes = 8 * (int64_t)(1 + draw(6)), piece->count = 1 + (int64_t)draw(6);
    int by_layer = draw(2);
    piece->step = by_layer ? piece->bytes * ENGINE_BLOCKS : piece->bytes + 8 * (int64_t)draw(3);
    piece->stride = by_layer ? piece->bytes : piece->step * piece->count + 8 * (int64_t)draw(3);
    block_bytes += piece->bytes * piece->count;
    ends[p] = (uint64_t)(piece->base + (ENGINE_BLOCKS - 1) * piece->stride +
                         (piece->count - 1) * piece->step + piece->bytes);
    device[p] = noise(ends[p], 0, &kept[p]);
    regions[p] = (uint64_t)device[p];
  }
  for (uint64_t p = 0; p < piece_count; p++) {
    alone_count += rows_of(pieces + p, block_bytes, together + together_count, alone + alone_count);
    together_count += (uint64_t)pieces[p].count;
  }
  uint64_t part_bytes = per * (uint64_t)block_bytes, one_extent = draw(2);
  for (uint64_t n = 0; n < slots; n++) {
    numbers[n] = one_extent ? 0 : (uint32_t)draw(EXTENTS);
    offsets[n] = part_bytes * nth_of[numbers[n]]++;
  }
  for (uint64_t e = 0; e < EXTENTS; e++) {
    extents[e] = noise(part_bytes * nth_of[e] + 1, 0, &kept[PIECES + e]);
    mappings[e] = (uint64_t)extents[e];
  }
  uint64_t is_store = draw(2), blocks = slots * per;
  uint8_t taken[ENGINE_BLOCKS] = {0};
  for (uint64_t n = 0; n < blocks; n++) { /* each once: a load's outcome is left open else */
    uint64_t next = n && engine[n - 1] != NO_BLOCK ? engine[n - 1] + 1u : draw(ENGINE_BLOCKS);
    if (!draw(3)) next = draw(ENGINE_BLOCKS);
    engine[n] = next >= ENGINE_BLOCKS || taken[next] || !draw(8) ? NO_BLOCK : (uint32_t)next;
    if (engine[n] != NO_BLOCK) taken[engine[n]] = 1;
  }
  uint64_t room = blocks * (together_count + alone_count);
  struct gpu_run *runs = malloc(room * sizeof *runs);
  struct gpu_plan plan = {together, alone, together_count, alone_count, regions, mappings,
                          (uint64_t)block_bytes, per, numbers, offsets, engine, slots, runs};
  struct gpu_submission *work = calloc(1, sizeof *work);
  uint64_t telling = draw(2), most = 8 * (1 + draw(60));
  work->runs = runs, work->count = kvd_gpu_plan(&plan), work->is_store = is_store;
  check(work->count <= room, "more runs than there is room for");
  work->stream = &calls, work->tells = telling;
  work->batch = !draw(4) ? 0 : telling ? (void *)batch_telling : (void *)batch;
  work->strided = strided, work->to_device = to_device, work->to_host = to_host;
  work->batch_copies = 1 + draw(draw(2) ? 4 : MOST_BATCH), work->narrow_bytes = 8 * draw(8);
  work->least_steps = 2 + draw(4), work->most_pitch = draw(4) ? 1u << 31 : 8 * draw(50);
  calls = 0, refuse_at = wrong_calls;
  int error = 0;
  while (!error && work->run < work->count) {
    uint64_t before = work->copied;
    error = kvd_gpu_submit(work, most);
    check(error || (work->copied > before && work->copied - before <= most), "a piece's bytes");
  }
  check(!error || (error == 1 && work->failed), "an error without a name");
  for (uint64_t n = 0; n < blocks && !error; n++)
    for (uint64_t p = 0; p < piece_count && engine[n] != NO_BLOCK; p++)
      for (int64_t k = 0; k < pieces[p].count; k++) {
        const uint8_t *there = device[p] + pieces[p].base + engine[n] * pieces[p].stride;
        const uint8_t *here = extents[numbers[n / per]] + offsets[n / per] +
                              n % per * (uint64_t)block_bytes + (uint64_t)pieces[p].at;
        check(!memcmp(there + k * pieces[p].step, here + k * pieces[p].bytes,
                      (size_t)pieces[p].bytes), "a block's bytes");
      }
  for (uint64_t p = 0; p < piece_count; p++) free(kept[p]);
  for (uint64_t e = 0; e < EXTENTS; e++) free(kept[PIECES + e]);
  free(runs), free(work);
}

int main(int count, char **given) {
  int rounds = count > 1 ? atoi(given[1]) : 100;
  for (int n = 0; n < LINE_WORDS; n++) word_keys[n] = draw(1u << 31) << 20 | 1;
  for (int n = 0; n < LINES; n++) line_keys[n] = draw(1u << 31) << 20 | 1;
  for (int level = 0; level <= kvd_level(); level++)
    for (int n = 0; n < rounds; n++) {
      one(level), tag_table(), key_index(), ghosts(), gpu_lists();
      to_a_file_and_back(level);
    }
  printf("%d levels are clean\n", kvd_level() + 1);
  return 0;
}
