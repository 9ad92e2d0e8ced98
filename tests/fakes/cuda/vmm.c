/* Virtual memory management: physical memory by handles, mapped at reserved addresses.
 *
 * A handle is a reference to physical memory, and so is a mapping: the memory goes when both are
 * gone. What may be exported is said when it is made. The descriptor for another process is a file
 * of the fake's that holds only a number: nobody can map it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake.h"

enum { MOST_HANDLES = 4096, MOST_RESERVATIONS = 4096, MARK = 0x6b766402 };

struct physical {
    int references; /* 0: this row is free */
    struct allocation of;
    CUdevice device;
    bool imported;
};

struct reservation {
    CUdeviceptr base; /* 0: this row is free */
    size_t bytes;
};

/* What an exported descriptor holds. */
struct shared {
    uint64_t mark, allocation, nonce;
};

static struct physical physicals[MOST_HANDLES]; /* a handle is a row's number + 1 */
static struct reservation reservations[MOST_RESERVATIONS];

/* -- handles, under local_lock -- */

static struct physical *physical_of(CUmemGenericAllocationHandle handle) {
    bool known = handle >= 1 && handle <= MOST_HANDLES && physicals[handle - 1].references > 0;
    return known ? &physicals[handle - 1] : NULL;
}

static CUmemGenericAllocationHandle list_physical(struct physical fresh) {
    for (int i = 0; i < MOST_HANDLES; i++) {
        if (physicals[i].references != 0) continue;
        physicals[i] = fresh;
        physicals[i].references = 1;
        return (CUmemGenericAllocationHandle)i + 1;
    }
    return 0;
}

static void release(struct physical *physical) {
    if (--physical->references == 0) drop_allocation(physical->of.id, !physical->imported);
}

static bool is_reserved(CUdeviceptr address, size_t bytes) {
    for (int i = 0; i < MOST_RESERVATIONS; i++) {
        const struct reservation *at = &reservations[i];
        if (at->base != 0 && at->base <= address && address + bytes <= at->base + at->bytes)
            return true;
    }
    return false;
}

/* -- physical memory -- */

static CUresult check_properties(const CUmemAllocationProp *properties) {
    if (properties == NULL || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    return check_device(properties->location.id);
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity,
                                              const CUmemAllocationProp *properties,
                                              CUmemAllocationGranularity_flags option) {
    ENTER();
    (void)option;
    CUresult result = check_properties(properties);
    if (result == CUDA_SUCCESS) *granularity = GRANULARITY;
    return result;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                            const CUmemAllocationProp *properties, unsigned long long flags) {
    ENTER_CONTEXT();
    CUresult result = check_properties(properties);
    if (result != CUDA_SUCCESS) return result;
    if (flags != 0 || bytes == 0 || bytes % GRANULARITY != 0) return CUDA_ERROR_INVALID_VALUE;
    struct physical fresh = {.device = properties->location.id};
    result = take_allocation(bytes, machine_device(fresh.device), VMM,
                             (int)properties->requestedHandleTypes, &fresh.of);
    if (result != CUDA_SUCCESS) return result;
    int fd = open_memory(fresh.of.id, bytes);
    if (fd >= 0) close(fd);
    pthread_mutex_lock(&local_lock);
    CUmemGenericAllocationHandle made = fd >= 0 ? list_physical(fresh) : 0;
    pthread_mutex_unlock(&local_lock);
    if (made == 0) {
        drop_allocation(fresh.of.id, true);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = made;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER_CONTEXT();
    pthread_mutex_lock(&local_lock);
    struct physical *physical = physical_of(handle);
    if (physical != NULL) release(physical);
    pthread_mutex_unlock(&local_lock);
    return physical == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    ENTER_CONTEXT();
    pthread_mutex_lock(&local_lock);
    pthread_rwlock_rdlock(&ranges_lock);
    struct range *range = range_at((CUdeviceptr)address);
    CUmemGenericAllocationHandle found = range == NULL ? 0 : range->handle;
    pthread_rwlock_unlock(&ranges_lock);
    struct physical *physical = physical_of(found);
    if (physical != NULL) {
        physical->references++;
        *handle = found;
    }
    pthread_mutex_unlock(&local_lock);
    return physical == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                       CUmemGenericAllocationHandle handle) {
    ENTER_CONTEXT();
    pthread_mutex_lock(&local_lock);
    struct physical *physical = physical_of(handle);
    if (physical != NULL) {
        *properties = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED};
        properties->requestedHandleTypes = (CUmemAllocationHandleType)physical->of.handle_types;
        properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        properties->location.id = physical->device;
    }
    pthread_mutex_unlock(&local_lock);
    return physical == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* -- for other processes -- */

EXPORT CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type,
                                             unsigned long long flags) {
    ENTER_CONTEXT();
    if (shareable == NULL || flags != 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&local_lock);
    struct physical *physical = physical_of(handle);
    bool exportable = physical != NULL && (physical->of.handle_types & (int)type) != 0;
    struct shared shared = {.mark = MARK};
    if (exportable) {
        shared.allocation = physical->of.id;
        shared.nonce = physical->of.nonce;
    }
    pthread_mutex_unlock(&local_lock);
    if (!exportable) return CUDA_ERROR_INVALID_VALUE;
    int fd = memfd_create("kvd-fake-cuda", MFD_CLOEXEC);
    if (fd < 0 || write(fd, &shared, sizeof shared) != sizeof shared) return CUDA_ERROR_OPERATING_SYSTEM;
    *(int *)shareable = fd;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle,
                                               CUmemAllocationHandleType type) {
    ENTER_CONTEXT();
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    struct shared shared;
    ssize_t n = pread((int)(intptr_t)os_handle, &shared, sizeof shared, 0);
    struct physical fresh = {.device = current_context()->device, .imported = true};
    bool known = n == sizeof shared && shared.mark == MARK &&
                 hold_allocation(shared.allocation, false, &fresh.of) == CUDA_SUCCESS;
    if (!known || fresh.of.nonce != shared.nonce) {
        violation(BAD_HANDLES);
        if (known) drop_allocation(shared.allocation, false);
        return CUDA_ERROR_INVALID_VALUE;
    }
    /* Opened in its own process, the memory has one owner all the same. */
    pthread_mutex_lock(&local_lock);
    *handle = list_physical(fresh);
    pthread_mutex_unlock(&local_lock);
    count(VMM_IMPORTS, 1);
    return *handle == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

/* -- addresses -- */

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment,
                                    CUdeviceptr wish, unsigned long long flags) {
    ENTER_CONTEXT();
    (void)wish; /* a wish may be refused, and is */
    if (flags != 0 || bytes == 0 || bytes % GRANULARITY != 0) return CUDA_ERROR_INVALID_VALUE;
    if ((alignment & (alignment - 1)) != 0) return CUDA_ERROR_INVALID_VALUE;
    struct reservation fresh = {.base = reserve_addresses(bytes, alignment), .bytes = bytes};
    if (fresh.base == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    bool listed = false;
    pthread_mutex_lock(&local_lock);
    for (int i = 0; i < MOST_RESERVATIONS && !listed; i++) {
        if (reservations[i].base != 0) continue;
        reservations[i] = fresh;
        listed = true;
    }
    pthread_mutex_unlock(&local_lock);
    *address = fresh.base;
    return listed ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    ENTER_CONTEXT();
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&local_lock);
    pthread_rwlock_rdlock(&ranges_lock);
    bool mapped = false;
    for (CUdeviceptr at = address; at < address + bytes; at += GRANULARITY)
        mapped = mapped || range_at(at) != NULL;
    pthread_rwlock_unlock(&ranges_lock);
    for (int i = 0; i < MOST_RESERVATIONS && !mapped; i++) {
        if (reservations[i].base != address || reservations[i].bytes != bytes) continue;
        reservations[i].base = 0;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&local_lock);
    return result;
}

/* -- mappings: each is one range, and a reference to its memory -- */

static CUresult map_physical(CUdeviceptr address, size_t bytes, size_t offset,
                             CUmemGenericAllocationHandle handle) {
    struct physical *physical = physical_of(handle);
    bool fits = physical != NULL && offset + bytes <= physical->of.bytes &&
                address % GRANULARITY == 0 && bytes % GRANULARITY == 0 && bytes != 0 &&
                is_reserved(address, bytes);
    if (!fits) return CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_rdlock(&ranges_lock);
    struct range *there = range_at(address);
    pthread_rwlock_unlock(&ranges_lock);
    if (there != NULL) return CUDA_ERROR_INVALID_VALUE;
    struct range range = {.base = address, .bytes = bytes, .of = physical->of, .offset = offset,
                          .device = physical->device, .handle = handle,
                          .fd = open_memory(physical->of.id, 0)};
    CUresult result = range.fd < 0 ? CUDA_ERROR_MAP_FAILED : add_range(range);
    if (result == CUDA_SUCCESS)
        physical->references++;
    else if (range.fd >= 0)
        close(range.fd);
    return result;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                         CUmemGenericAllocationHandle handle, unsigned long long flags) {
    ENTER_CONTEXT();
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&local_lock);
    CUresult result = map_physical(address, bytes, offset, handle);
    pthread_mutex_unlock(&local_lock);
    return result;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    ENTER_CONTEXT();
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&local_lock);
    for (CUdeviceptr at = address; at < address + bytes;) {
        pthread_rwlock_rdlock(&ranges_lock);
        struct range *range = range_at(at), found = {0};
        if (range != NULL) found = *range;
        pthread_rwlock_unlock(&ranges_lock);
        /* Several mappings may go at once, but none in part. */
        if (range == NULL || found.handle == 0 || found.base != at ||
            found.base + found.bytes > address + bytes)
            break;
        remove_range(at);
        release(physical_of(found.handle));
        at += found.bytes;
        if (at == address + bytes) result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&local_lock);
    return result;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access,
                               size_t number) {
    ENTER_CONTEXT();
    if (access == NULL || number == 0) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_wrlock(&ranges_lock);
    for (CUdeviceptr at = address; at < address + bytes;) {
        struct range *range = range_at(at);
        if (range == NULL || range->handle == 0) break;
        range->accessible = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        at = range->base + range->bytes;
        if (at >= address + bytes) result = CUDA_SUCCESS;
    }
    pthread_rwlock_unlock(&ranges_lock);
    return result;
}
