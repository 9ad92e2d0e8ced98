/* What the fake's files share. Each area has a file; the order of locks, outermost first, is
 * local_lock (this process's tables), a stream's own lock, the shared state's lock. */
#ifndef KVD_FAKE_H
#define KVD_FAKE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "api.h"

enum { MOST_DEVICES = 8, GRANULARITY = 2 << 20 };

/* -- state.c: what all processes share ------------------------------------------------------- */

enum setting {
    DEVICES_COUNT, DEVICE_BYTES, CONTEXT_BYTES, COMPUTE_MODE, MPS_ON, DRIVER_VERSION,
    HOST_POINTER_USABLE, BANDWIDTH, LATENCY, COPY_ERROR_CODE, COPY_ERROR_AFTER, COPY_ERROR_PID,
    REGISTER_BYTES, REGISTER_CODE, OPEN_CODE, CONTEXT_CODE, CAPTURE_PID,
    PCI_DOMAIN, SETTINGS
};

enum counter {
    COPIES_ASYNC, COPIES_SYNC, COPIES_2D, BATCHES, BATCH_COPIES, KERNELS, MEMSETS, PAGEABLE_COPIES,
    BYTES_TO_DEVICE, BYTES_TO_HOST, REGISTRATIONS, UNREGISTRATIONS, IPC_OPENS, IPC_CLOSES,
    VMM_IMPORTS,
    /* What no correct program does. */
    USE_AFTER_FREE, OUT_OF_BOUNDS, HOST_MEMORY_GONE, UNREGISTERED_WHILE_QUEUED,
    UNMAPPED_WHILE_REGISTERED, ACROSS_REGISTRATIONS, FREED_WHILE_OPEN, BAD_HANDLES, BAD_BATCHES,
    KERNEL_FAULTS,
    VIOLATIONS, /* the sum of those above */
    /* What there is now, over all processes that live. */
    REGISTERED_BYTES, CONTEXTS, ALLOCATIONS, IPC_OPEN, COUNTERS
};

enum kind { MALLOC, MANAGED, POOL, VMM };

/* Device memory as all processes know it. It lives while a living process holds it. */
struct allocation {
    uint64_t id; /* 0: this row is free */
    uint64_t bytes;
    int device; /* by the machine's numbers */
    enum kind kind;
    int handle_types;
    int owner; /* row of the process that made it; -1 once that freed it or died */
    uint64_t nonce;
};

void state_attach(void);
void state_detach(void);
bool state_attached(void);
int state_me(void);
long long setting(enum setting which);
void count(enum counter which, long long by);
void violation(enum counter which);
CUresult take_allocation(uint64_t bytes, int device, enum kind kind, int handle_types,
                         struct allocation *made);
bool find_allocation(uint64_t id, struct allocation *found);
CUresult hold_allocation(uint64_t id, bool of_owner_only, struct allocation *found);
void drop_allocation(uint64_t id, bool by_owner);
int open_memory(uint64_t id, uint64_t make_bytes);
CUresult take_context(int device);
void drop_context(int device);
void device_memory(int device, uint64_t *free_bytes, uint64_t *total);
CUresult grow_registered(long long by);
CUresult copy_fault(void);

/* -- device.c: devices, contexts, this process's health -------------------------------------- */

struct CUctx_st {
    int device; /* by this process's numbers */
    int references;
    CUstream null_stream;
};

extern pthread_mutex_t local_lock;
CUresult enter(void);
CUresult enter_context(void);
CUcontext current_context(void);
CUresult sticky_error(void);
CUresult fail_for_good(CUresult code);
void forget_error(void);
CUresult check_device(CUdevice device);
int machine_device(CUdevice device);
void device_uuid(int machine, CUuuid *uuid);

#define ENTER()                                     \
    do {                                            \
        CUresult bad = enter();                     \
        if (bad != CUDA_SUCCESS) return bad;        \
    } while (0)
#define ENTER_CONTEXT()                             \
    do {                                            \
        CUresult bad = enter_context();             \
        if (bad != CUDA_SUCCESS) return bad;        \
    } while (0)

/* -- ranges.c: device addresses of this process ---------------------------------------------- */

struct range {
    CUdeviceptr base;
    size_t bytes;
    struct allocation of;
    size_t offset; /* in the allocation, where only a part of it is mapped */
    int fd;
    CUdevice device;
    bool imported; /* by cuIpcOpenMemHandle */
    bool accessible; /* VMM: cuMemSetAccess was called */
    int references;  /* opens */
    CUmemoryPool pool;
    CUmemGenericAllocationHandle handle;
};

/* Held for reading while bytes move, for writing while ranges come and go. */
extern pthread_rwlock_t ranges_lock;
bool is_device_address(CUdeviceptr address);
CUdeviceptr reserve_addresses(size_t bytes, size_t alignment);
CUresult add_range(struct range range);
void remove_range(CUdeviceptr base);
void remove_ranges_of(CUdevice device);
struct range *range_at(CUdeviceptr address);
struct range *range_of_allocation(uint64_t id);
void let_kernels_reach(bool on);
CUresult take_and_map(struct range *range, enum kind kind, int handle_types);

/* -- host.c: registered host memory ---------------------------------------------------------- */

enum pinned { PAGEABLE, PINNED, PARTLY_PINNED };
enum pinned how_pinned(uint64_t address, size_t bytes);
bool is_reached(uint64_t address);
bool registration_of(uint64_t address, uint64_t *base, size_t *bytes);

/* -- stream.c: queues, each with a thread ---------------------------------------------------- */

/* One step of a queue. `run` does it, on the stream's thread, and answers with an error that
 * then holds for good; `drop` gives back what the step owns. */
struct step {
    struct step *next;
    CUresult (*run)(struct step *step, CUstream stream);
    void (*drop)(struct step *step);
    uint64_t ticket;
};

CUresult enqueue(CUstream stream, struct step *step, bool wait);
CUresult check_stream(CUstream stream);
bool is_null_stream(CUstream stream);
void drain_streams(void);
void end_streams_of(CUdevice device);
void pace(CUstream stream, size_t bytes);
int64_t now_ns(void);

/* -- copies.c -------------------------------------------------------------------------------- */

/* A rectangle of bytes: `height` stretches of `width` bytes. */
struct rectangle {
    uint64_t to, from;
    size_t to_pitch, from_pitch;
    size_t width, height;
};

struct copies {
    size_t count;
    const struct rectangle *rectangles;
    enum counter counted_as;
    bool any_order;      /* of a batch: among each other */
    bool sources_early;  /* the sources may be read before the stream gets there */
    bool wait;
};

CUresult submit(CUstream stream, const struct copies *copies);
CUresult check_device_side(CUdeviceptr address, size_t bytes);
CUresult write_device(CUdeviceptr to, unsigned char *from, size_t bytes);

#endif
