/* Host memory that the device reaches: registered, or allocated so. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fake.h"

enum { MOST_REGISTRATIONS = 16384, LOOKED_AT_ONCE = 4096 };

struct registration {
    uint64_t base;
    size_t bytes;
    bool allocated; /* by cuMemHostAlloc, which is freed and not unregistered */
    unsigned int flags;
};

/* By address; none overlaps another. */
static struct registration registrations[MOST_REGISTRATIONS];
static int registration_count;
static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;

/* The place of the first registration that ends after an address. */
static int place_of(uint64_t address) {
    int low = 0, high = registration_count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (registrations[middle].base + registrations[middle].bytes <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* A copy may not run from one registration into another, or past its end: the driver looks at the
 * whole range by what its first byte is in. */
enum pinned how_pinned(uint64_t address, size_t bytes) {
    pthread_rwlock_rdlock(&lock);
    int place = place_of(address);
    const struct registration *at = &registrations[place];
    enum pinned how = PAGEABLE;
    if (place < registration_count && at->base < address + bytes)
        how = at->base <= address && address + bytes <= at->base + at->bytes ? PINNED
                                                                            : PARTLY_PINNED;
    pthread_rwlock_unlock(&lock);
    return how;
}

/* Where the device has addresses of its own for registered memory, those of the host name nothing
 * there; memory that the driver allocated has the same on both sides. */
bool is_reached(uint64_t address) {
    if (setting(HOST_POINTER_USABLE)) return true;
    pthread_rwlock_rdlock(&lock);
    int place = place_of(address);
    bool reached = place < registration_count && registrations[place].base <= address &&
                   registrations[place].allocated;
    pthread_rwlock_unlock(&lock);
    return reached;
}

bool registration_of(uint64_t address, uint64_t *base, size_t *bytes) {
    pthread_rwlock_rdlock(&lock);
    int place = place_of(address);
    bool found = place < registration_count && registrations[place].base <= address;
    if (found) {
        *base = registrations[place].base;
        *bytes = registrations[place].bytes;
    }
    pthread_rwlock_unlock(&lock);
    return found;
}

/* Whether every page of a range is mapped. */
static bool is_mapped(uint64_t address, size_t bytes) {
    uint64_t start = address / 4096 * 4096, end = address + bytes;
    unsigned char present[LOOKED_AT_ONCE];
    for (uint64_t at = start; at < end; at += LOOKED_AT_ONCE * 4096ULL) {
        size_t length = end - at < LOOKED_AT_ONCE * 4096ULL ? end - at : LOOKED_AT_ONCE * 4096ULL;
        if (mincore((void *)at, length, present) != 0) return false;
    }
    return true;
}

static CUresult add(struct registration fresh) {
    pthread_rwlock_wrlock(&lock);
    int place = place_of(fresh.base);
    bool overlaps =
        place < registration_count && registrations[place].base < fresh.base + fresh.bytes;
    CUresult result = overlaps ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
                      : registration_count == MOST_REGISTRATIONS
                          ? CUDA_ERROR_OUT_OF_MEMORY
                          : grow_registered((long long)fresh.bytes);
    if (result == CUDA_SUCCESS) {
        struct registration *at = &registrations[place];
        memmove(at + 1, at, (size_t)(registration_count++ - place) * sizeof *at);
        *at = fresh;
    }
    pthread_rwlock_unlock(&lock);
    return result;
}

static bool take_out(uint64_t base, bool allocated, struct registration *taken) {
    pthread_rwlock_wrlock(&lock);
    int place = place_of(base);
    struct registration *at = &registrations[place];
    bool found = place < registration_count && at->base == base && at->allocated == allocated;
    if (found) {
        *taken = *at;
        memmove(at, at + 1, (size_t)(--registration_count - place) * sizeof *at);
        grow_registered(-(long long)taken->bytes);
    }
    pthread_rwlock_unlock(&lock);
    return found;
}

EXPORT CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags) {
    ENTER_CONTEXT();
    if (address == NULL || bytes == 0 || flags > 0xf) return CUDA_ERROR_INVALID_VALUE;
    if (is_device_address((uint64_t)address) || !is_mapped((uint64_t)address, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result =
        add((struct registration){.base = (uint64_t)address, .bytes = bytes, .flags = flags});
    if (result == CUDA_SUCCESS) count(REGISTRATIONS, 1);
    return result;
}

EXPORT CUresult cuMemHostUnregister(void *address) {
    ENTER_CONTEXT();
    struct registration taken;
    if (!take_out((uint64_t)address, false, &taken)) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    if (!is_mapped(taken.base, taken.bytes)) violation(UNMAPPED_WHILE_REGISTERED);
    count(UNREGISTRATIONS, 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned int flags) {
    ENTER_CONTEXT();
    if (address == NULL || bytes == 0 || flags > 7) return CUDA_ERROR_INVALID_VALUE;
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    struct registration fresh = {
        .base = (uint64_t)at, .bytes = bytes, .allocated = true, .flags = flags};
    CUresult result = add(fresh);
    if (result == CUDA_SUCCESS)
        *address = at;
    else
        munmap(at, bytes);
    return result;
}

EXPORT CUresult cuMemAllocHost_v2(void **address, size_t bytes) {
    return cuMemHostAlloc(address, bytes, 0);
}

EXPORT CUresult cuMemFreeHost(void *address) {
    ENTER_CONTEXT();
    drain_streams();
    struct registration taken;
    if (!take_out((uint64_t)address, true, &taken)) return CUDA_ERROR_INVALID_VALUE;
    munmap(address, taken.bytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned int flags) {
    ENTER_CONTEXT();
    uint64_t base;
    size_t bytes;
    if (flags != 0 || !registration_of((uint64_t)host, &base, &bytes))
        return CUDA_ERROR_INVALID_VALUE;
    *device = (CUdeviceptr)host;
    return CUDA_SUCCESS;
}
