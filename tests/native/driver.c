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

int main(int count, char **given) {
  int rounds = count > 1 ? atoi(given[1]) : 100;
  for (int n = 0; n < LINE_WORDS; n++) word_keys[n] = draw(1u << 31) << 20 | 1;
  for (int n = 0; n < LINES; n++) line_keys[n] = draw(1u << 31) << 20 | 1;
  for (int level = 0; level <= kvd_level(); level++)
    for (int n = 0; n < rounds; n++) one(level), tag_table(), key_index(), ghosts(), to_a_file_and_back(level);
  printf("%d levels are clean\n", kvd_level() + 1);
  return 0;
}
