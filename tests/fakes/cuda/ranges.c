/* Device addresses of this process.
 *
 * They all lie in one window of addresses that nothing else uses, and none is used twice: so an
 * address in the window that is in no live range is one that was freed or closed. The file of an
 * allocation is mapped there without any access, so that a host program that follows a device
 * pointer ends by SIGSEGV; copies go through the file's descriptor instead, and a kernel gets access
 * while it runs. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake.h"

enum { MOST_RANGES = 8192 };
static const size_t WINDOW_BYTES = 1ULL << 40;

pthread_rwlock_t ranges_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct range ranges[MOST_RANGES]; /* by address: addresses only grow */
static int range_count;
static CUdeviceptr window, next_address;

bool is_device_address(CUdeviceptr address) {
    return window != 0 && address >= window && address < window + WINDOW_BYTES;
}

static bool open_window(void) {
    if (window != 0) return true;
    void *at = mmap(NULL, WINDOW_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return false;
    window = (CUdeviceptr)at;
    next_address = window;
    return true;
}

/* Addresses that were never used before; 0 where there are none left. */
CUdeviceptr reserve_addresses(size_t bytes, size_t alignment) {
    pthread_rwlock_wrlock(&ranges_lock);
    CUdeviceptr found = 0;
    if (alignment < GRANULARITY) alignment = GRANULARITY;
    if (open_window()) {
        CUdeviceptr start = (next_address + alignment - 1) / alignment * alignment;
        if (bytes < WINDOW_BYTES && start + bytes + GRANULARITY < window + WINDOW_BYTES) {
            found = start;
            next_address = start + bytes + GRANULARITY; /* a gap: no two allocations touch */
        }
    }
    pthread_rwlock_unlock(&ranges_lock);
    return found;
}

static int protection_of(const struct range *range) {
    return range->of.kind == MANAGED ? PROT_READ | PROT_WRITE : PROT_NONE;
}

static size_t whole_pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

/* Map and list a range; what it owns is the list's from then on. */
CUresult add_range(struct range range) {
    pthread_rwlock_wrlock(&ranges_lock);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    void *at = MAP_FAILED;
    if (range_count < MOST_RANGES)
        at = mmap((void *)range.base, whole_pages(range.bytes), protection_of(&range),
                  MAP_SHARED | MAP_FIXED, range.fd, (off_t)range.offset);
    if (at != MAP_FAILED) {
        int place = range_count++;
        for (; place > 0 && ranges[place - 1].base > range.base; place--)
            ranges[place] = ranges[place - 1];
        ranges[place] = range;
        result = CUDA_SUCCESS;
    }
    pthread_rwlock_unlock(&ranges_lock);
    return result;
}

static void unlist(int place) {
    struct range *range = &ranges[place];
    mmap((void *)range->base, whole_pages(range->bytes), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    close(range->fd);
    memmove(range, range + 1, (size_t)(--range_count - place) * sizeof *range);
}

/* Unmap the range that begins at an address; who held its memory lets go of it apart. */
void remove_range(CUdeviceptr base) {
    pthread_rwlock_wrlock(&ranges_lock);
    for (int i = 0; i < range_count; i++) {
        if (ranges[i].base != base) continue;
        unlist(i);
        break;
    }
    pthread_rwlock_unlock(&ranges_lock);
}

void remove_ranges_of(CUdevice device) {
    pthread_rwlock_wrlock(&ranges_lock);
    for (int i = range_count - 1; i >= 0; i--) {
        if (ranges[i].device != device) continue;
        struct allocation of = ranges[i].of;
        unlist(i);
        drop_allocation(of.id, of.owner == state_me());
    }
    pthread_rwlock_unlock(&ranges_lock);
}

/* The live range around an address; NULL for none. Under ranges_lock. */
struct range *range_at(CUdeviceptr address) {
    int low = 0, high = range_count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (ranges[middle].base + ranges[middle].bytes <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low < range_count && ranges[low].base <= address ? &ranges[low] : NULL;
}

/* The range of an opened handle. Under ranges_lock. */
struct range *range_of_allocation(uint64_t id) {
    for (int i = 0; i < range_count; i++)
        if (ranges[i].of.id == id && ranges[i].imported) return &ranges[i];
    return NULL;
}

/* Give code of this process access to device memory, or take it away. Under ranges_lock. */
void let_kernels_reach(bool on) {
    for (int i = 0; i < range_count; i++)
        if (ranges[i].accessible)
            mprotect((void *)ranges[i].base, whole_pages(ranges[i].bytes),
                     on ? PROT_READ | PROT_WRITE : protection_of(&ranges[i]));
}

/* Claim device memory of range->bytes and map it at new addresses. */
CUresult take_and_map(struct range *range, enum kind kind, int handle_types) {
    range->device = current_context()->device;
    CUresult result = take_allocation(range->bytes, machine_device(range->device), kind,
                                      handle_types, &range->of);
    if (result != CUDA_SUCCESS) return result;
    range->fd = open_memory(range->of.id, whole_pages(range->bytes));
    range->base = reserve_addresses(range->bytes, GRANULARITY);
    range->accessible = true;
    if (range->fd >= 0 && range->base != 0 && add_range(*range) == CUDA_SUCCESS) return CUDA_SUCCESS;
    if (range->fd >= 0) close(range->fd);
    drop_allocation(range->of.id, true);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Whether an address is a device's, dead or alive: for the package `cupy`. */
EXPORT int kvdFakeIsDevice(CUdeviceptr address) { return is_device_address(address); }
