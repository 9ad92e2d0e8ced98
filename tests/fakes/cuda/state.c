/* What all processes share: one mapped file with tables, and a file per allocation of device memory.
 *
 * A killed process can't give anything back itself: whoever needs room sweeps the tables first, by
 * locks that end with their process. The tables' lock is robust: its holder may be killed too. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "fake.h"

enum { MOST_PROCESSES = 256, MOST_ALLOCATIONS = 8192, MOST_HOLDS = 16384, STATE_MADE = 0x6b766401 };

struct process {
    pid_t pid; /* 0: this row is free */
    int64_t registered_bytes;
    bool context[MOST_DEVICES];
};

struct hold {
    uint64_t allocation; /* 0: this row is free */
    int process;
};

struct state {
    uint32_t made;
    pthread_mutex_t lock;
    _Atomic long long settings[SETTINGS];
    _Atomic long long counters[COUNTERS];
    uint64_t last_id;
    struct process processes[MOST_PROCESSES];
    struct allocation allocations[MOST_ALLOCATIONS];
    struct hold holds[MOST_HOLDS];
};

static const struct {
    const char *name;
    long long value;
} DEFAULTS[SETTINGS] = {
    [DEVICES_COUNT] = {"devices.count", 1},
    [DEVICE_BYTES] = {"device_bytes.bytes", 8LL << 30},
    [CONTEXT_BYTES] = {"context_bytes.bytes", 256LL << 20},
    [COMPUTE_MODE] = {"compute_mode.mode", 0},
    [MPS_ON] = {"mps.on", 0},
    [DRIVER_VERSION] = {"driver_version.version", 13000},
    [HOST_POINTER_USABLE] = {"host_pointer.usable", 1},
    [BANDWIDTH] = {"bandwidth.bytes_per_second", 0},
    [LATENCY] = {"latency.microseconds", 100},
    [COPY_ERROR_CODE] = {"copy_error.code", 0},
    [COPY_ERROR_AFTER] = {"copy_error.after", 0},
    [COPY_ERROR_PID] = {"copy_error.pid", 0},
    [REGISTER_BYTES] = {"register_fails_after.bytes", -1},
    [REGISTER_CODE] = {"register_fails_after.code", CUDA_ERROR_OUT_OF_MEMORY},
    [OPEN_CODE] = {"open_fails.code", 0},
    [CONTEXT_CODE] = {"context_fails.code", 0},
    [CAPTURE_PID] = {"capture.pid", 0},
    [PCI_DOMAIN] = {"pci.domain", 0},
};

static const char *const COUNTER_NAMES[COUNTERS] = {
    [COPIES_ASYNC] = "copies_async", [COPIES_SYNC] = "copies_sync", [COPIES_2D] = "copies_2d",
    [BATCHES] = "batches", [BATCH_COPIES] = "batch_copies", [KERNELS] = "kernels",
    [MEMSETS] = "memsets", [PAGEABLE_COPIES] = "pageable_copies",
    [BYTES_TO_DEVICE] = "bytes_to_device", [BYTES_TO_HOST] = "bytes_to_host",
    [REGISTRATIONS] = "registrations", [UNREGISTRATIONS] = "unregistrations",
    [IPC_OPENS] = "ipc_opens", [IPC_CLOSES] = "ipc_closes", [VMM_IMPORTS] = "vmm_imports",
    [USE_AFTER_FREE] = "use_after_free", [OUT_OF_BOUNDS] = "out_of_bounds",
    [HOST_MEMORY_GONE] = "host_memory_gone",
    [UNREGISTERED_WHILE_QUEUED] = "unregistered_while_queued",
    [UNMAPPED_WHILE_REGISTERED] = "unmapped_while_registered",
    [ACROSS_REGISTRATIONS] = "across_registrations", [FREED_WHILE_OPEN] = "freed_while_open",
    [BAD_HANDLES] = "bad_handles", [BAD_BATCHES] = "bad_batches",
    [KERNEL_FAULTS] = "kernel_faults", [VIOLATIONS] = "violations",
    [REGISTERED_BYTES] = "registered_bytes", [CONTEXTS] = "contexts",
    [ALLOCATIONS] = "allocations", [IPC_OPEN] = "ipc_open",
};

static struct state *state;
static char directory[512];
static int my_row = -1;
static int state_fd = -1; /* kept open: closing it would end the lock on our row */

bool state_attached(void) { return state != NULL; }
int state_me(void) { return my_row; }
long long setting(enum setting which) { return atomic_load(&state->settings[which]); }

void count(enum counter which, long long by) { atomic_fetch_add(&state->counters[which], by); }

void violation(enum counter which) {
    count(which, 1);
    count(VIOLATIONS, 1);
}

static void lock_state(void) {
    if (pthread_mutex_lock(&state->lock) == EOWNERDEAD) pthread_mutex_consistent(&state->lock);
}

static void unlock_state(void) { pthread_mutex_unlock(&state->lock); }

/* -- processes -- */

/* Whether a row's process lives: it locks the byte of its row, and the kernel takes that back when
 * it ends, however it does and whatever number it has in another namespace. */
static bool lives(int row) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = row, .l_len = 1};
    return row == my_row || fcntl(state_fd, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

static void lock_row(int row) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = row, .l_len = 1};
    fcntl(state_fd, F_SETLK, &lock);
}

static bool is_held(uint64_t id) {
    for (int i = 0; i < MOST_HOLDS; i++)
        if (state->holds[i].allocation == id) return true;
    return false;
}

static struct allocation *allocation_of(uint64_t id) {
    for (int i = 0; id != 0 && i < MOST_ALLOCATIONS; i++)
        if (state->allocations[i].id == id) return &state->allocations[i];
    return NULL;
}

static void memory_path(uint64_t id, char *path, size_t most) {
    snprintf(path, most, "%s/memory-%llu", directory, (unsigned long long)id);
}

static void forget_if_unheld(uint64_t id) {
    struct allocation *found = allocation_of(id);
    if (found == NULL || is_held(id)) return;
    char path[600];
    memory_path(id, path, sizeof path);
    unlink(path);
    found->id = 0;
}

static void bury(int row) {
    for (int i = 0; i < MOST_ALLOCATIONS; i++)
        if (state->allocations[i].owner == row) state->allocations[i].owner = -1;
    for (int i = 0; i < MOST_HOLDS; i++) {
        struct hold *hold = &state->holds[i];
        if (hold->allocation == 0 || hold->process != row) continue;
        uint64_t id = hold->allocation;
        hold->allocation = 0;
        forget_if_unheld(id);
    }
    memset(&state->processes[row], 0, sizeof state->processes[row]);
}

static void sweep(void) {
    for (int row = 0; row < MOST_PROCESSES; row++) {
        struct process *process = &state->processes[row];
        if (process->pid != 0 && !lives(row)) bury(row);
    }
}

static void join_processes(void) {
    lock_state();
    sweep();
    for (int row = 0; row < MOST_PROCESSES && my_row < 0; row++)
        if (state->processes[row].pid == 0) my_row = row;
    if (my_row >= 0)
        state->processes[my_row] = (struct process){.pid = getpid()};
    if (my_row >= 0) lock_row(my_row);
    unlock_state();
}

/* -- the file -- */

static void make_state(void) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&state->lock, &attributes);
    for (int i = 0; i < SETTINGS; i++) atomic_store(&state->settings[i], DEFAULTS[i].value);
    state->made = STATE_MADE;
}

/* Map the state of the directory that the environment names; without one there is no driver. */
void state_attach(void) {
    const char *where = getenv("KVD_FAKE_CUDA_DIR");
    if (state != NULL || where == NULL || strlen(where) >= sizeof directory) return;
    snprintf(directory, sizeof directory, "%s", where);
    char path[600];
    snprintf(path, sizeof path, "%s/state", directory);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return;
    flock(fd, LOCK_EX); /* the first of all makes it */
    if (ftruncate(fd, sizeof *state) == 0) {
        void *at = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (at != MAP_FAILED) state = at;
    }
    if (state != NULL && state->made != STATE_MADE) make_state();
    flock(fd, LOCK_UN);
    state_fd = fd;
    if (state != NULL) join_processes();
}

void state_detach(void) {
    if (state == NULL) return;
    lock_state();
    bury(my_row);
    unlock_state();
    munmap(state, sizeof *state);
    close(state_fd);
    state = NULL;
    my_row = state_fd = -1;
}

/* -- allocations and who holds them -- */

static uint64_t used_bytes(int device) {
    uint64_t used = 0;
    for (int row = 0; row < MOST_PROCESSES; row++)
        if (state->processes[row].context[device]) used += (uint64_t)setting(CONTEXT_BYTES);
    for (int i = 0; i < MOST_ALLOCATIONS; i++)
        if (state->allocations[i].id != 0 && state->allocations[i].device == device)
            used += state->allocations[i].bytes;
    return used;
}

static uint64_t free_of(int device) {
    uint64_t total = (uint64_t)setting(DEVICE_BYTES), used = used_bytes(device);
    return used > total ? 0 : total - used;
}

void device_memory(int device, uint64_t *free_bytes, uint64_t *total) {
    lock_state();
    sweep();
    *free_bytes = free_of(device);
    *total = (uint64_t)setting(DEVICE_BYTES);
    unlock_state();
}

static bool add_hold(uint64_t id) {
    for (int i = 0; i < MOST_HOLDS; i++) {
        if (state->holds[i].allocation != 0) continue;
        state->holds[i] = (struct hold){.allocation = id, .process = my_row};
        return true;
    }
    return false;
}

static struct allocation *free_row(void) {
    for (int i = 0; i < MOST_ALLOCATIONS; i++)
        if (state->allocations[i].id == 0) return &state->allocations[i];
    return NULL;
}

/* Claim device memory for this process, which then holds it. */
CUresult take_allocation(uint64_t bytes, int device, enum kind kind, int handle_types,
                         struct allocation *made) {
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    lock_state();
    sweep();
    struct allocation *row = free_row();
    if (row != NULL && bytes <= free_of(device) && add_hold(state->last_id + 1)) {
        *row = (struct allocation){.id = ++state->last_id, .bytes = bytes, .device = device,
                                   .kind = kind, .handle_types = handle_types, .owner = my_row};
        if (getrandom(&row->nonce, sizeof row->nonce, 0) < 0) row->nonce = row->id;
        *made = *row;
        result = CUDA_SUCCESS;
    }
    unlock_state();
    return result;
}

bool find_allocation(uint64_t id, struct allocation *found) {
    lock_state();
    sweep();
    struct allocation *row = allocation_of(id);
    if (row != NULL) *found = *row;
    unlock_state();
    return row != NULL;
}

/* Hold another process's memory. With `of_owner_only` its owner must still have it. */
CUresult hold_allocation(uint64_t id, bool of_owner_only, struct allocation *found) {
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    lock_state();
    sweep();
    struct allocation *row = allocation_of(id);
    if (row != NULL && (!of_owner_only || row->owner >= 0) && add_hold(id)) {
        *found = *row;
        result = CUDA_SUCCESS;
    }
    unlock_state();
    return result;
}

/* Let go of memory once; when nobody holds it any more it is free. */
void drop_allocation(uint64_t id, bool by_owner) {
    lock_state();
    sweep();
    for (int i = 0; i < MOST_HOLDS; i++) {
        if (state->holds[i].allocation != id || state->holds[i].process != my_row) continue;
        state->holds[i].allocation = 0;
        break;
    }
    struct allocation *row = allocation_of(id);
    if (row != NULL && by_owner) {
        row->owner = -1;
        if (row->kind == MALLOC && is_held(id)) violation(FREED_WHILE_OPEN);
    }
    forget_if_unheld(id);
    unlock_state();
}

/* The file in which an allocation's bytes lie; made with `make_bytes` where that isn't 0. */
int open_memory(uint64_t id, uint64_t make_bytes) {
    char path[600];
    memory_path(id, path, sizeof path);
    int fd = open(path, O_RDWR | O_CLOEXEC | (make_bytes ? O_CREAT | O_EXCL : 0), 0600);
    if (fd >= 0 && make_bytes && ftruncate(fd, (off_t)make_bytes) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* -- contexts, registered memory, faults -- */

static bool another_has_context(int device) {
    for (int row = 0; row < MOST_PROCESSES; row++)
        if (row != my_row && state->processes[row].context[device]) return true;
    return false;
}

CUresult take_context(int device) {
    long long mode = setting(COMPUTE_MODE), injected = setting(CONTEXT_CODE);
    CUresult result = CUDA_SUCCESS;
    lock_state();
    sweep();
    if (injected != 0)
        result = (CUresult)injected;
    else if (mode == 2 || (mode == 3 && another_has_context(device)))
        result = CUDA_ERROR_DEVICE_UNAVAILABLE;
    else if (free_of(device) < (uint64_t)setting(CONTEXT_BYTES))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    else
        state->processes[my_row].context[device] = true;
    unlock_state();
    return result;
}

void drop_context(int device) {
    lock_state();
    state->processes[my_row].context[device] = false;
    unlock_state();
}

CUresult grow_registered(long long by) {
    long long most = setting(REGISTER_BYTES);
    CUresult result = CUDA_SUCCESS;
    lock_state();
    struct process *me = &state->processes[my_row];
    if (by > 0 && most >= 0 && me->registered_bytes + by > most)
        result = (CUresult)setting(REGISTER_CODE);
    else
        me->registered_bytes += by;
    unlock_state();
    return result;
}

/* The injected error, if this copy is the one that it is meant for. */
CUresult copy_fault(void) {
    if (setting(COPY_ERROR_CODE) == 0) return CUDA_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    lock_state();
    long long pid = setting(COPY_ERROR_PID), after = setting(COPY_ERROR_AFTER);
    if (setting(COPY_ERROR_CODE) != 0 && (pid == 0 || pid == getpid())) {
        if (after > 0) {
            atomic_store(&state->settings[COPY_ERROR_AFTER], after - 1);
        } else {
            result = (CUresult)setting(COPY_ERROR_CODE);
            atomic_store(&state->settings[COPY_ERROR_CODE], 0);
        }
    }
    unlock_state();
    return result;
}

/* -- what tests ask of the fake -- */

static int setting_named(const char *name) {
    for (int i = 0; i < SETTINGS; i++)
        if (strcmp(DEFAULTS[i].name, name) == 0) return i;
    return -1;
}

EXPORT int kvdFakeSet(const char *name, long long value) {
    state_attach();
    int which = setting_named(name);
    if (state == NULL || which < 0) return -1;
    atomic_store(&state->settings[which], value);
    return 0;
}

EXPORT int kvdFakeGet(const char *name, long long *value) {
    state_attach();
    int which = setting_named(name);
    if (state == NULL || which < 0) return -1;
    *value = setting(which);
    return 0;
}

EXPORT const char *kvdFakeCounterName(int which) {
    return which >= 0 && which < COUNTERS ? COUNTER_NAMES[which] : NULL;
}

static long long what_there_is(enum counter which) {
    long long sum = 0;
    lock_state();
    sweep();
    for (int row = 0; row < MOST_PROCESSES; row++) {
        const struct process *process = &state->processes[row];
        if (which == REGISTERED_BYTES) sum += process->registered_bytes;
        for (int device = 0; which == CONTEXTS && device < MOST_DEVICES; device++)
            sum += process->context[device];
    }
    for (int i = 0; i < MOST_ALLOCATIONS; i++)
        if (which == ALLOCATIONS && state->allocations[i].id != 0) sum++;
    for (int i = 0; i < MOST_HOLDS; i++) {
        const struct allocation *row = allocation_of(state->holds[i].allocation);
        if (which == IPC_OPEN && row != NULL && row->owner != state->holds[i].process) sum++;
    }
    unlock_state();
    return sum;
}

EXPORT long long kvdFakeCounter(int which) {
    state_attach();
    if (state == NULL || which < 0 || which >= COUNTERS) return -1;
    return which > VIOLATIONS ? what_there_is(which) : atomic_load(&state->counters[which]);
}

EXPORT int kvdFakeFreeBytes(int device, long long *value) {
    state_attach();
    if (state == NULL || device < 0 || device >= setting(DEVICES_COUNT)) return -1;
    uint64_t free_bytes, total;
    device_memory(device, &free_bytes, &total);
    *value = (long long)free_bytes;
    return 0;
}

/* Settings and counters as they were at first; this process well again. */
EXPORT void kvdFakeReset(void) {
    state_attach();
    if (state == NULL) return;
    for (int i = 0; i < SETTINGS; i++) atomic_store(&state->settings[i], DEFAULTS[i].value);
    for (int i = 0; i < COUNTERS; i++) atomic_store(&state->counters[i], 0);
    forget_error();
}

EXPORT void kvdFakeClose(void) { state_detach(); }
