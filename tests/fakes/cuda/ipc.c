/* Memory handles for other processes.
 *
 * A handle names a whole allocation and says nothing of an offset; the exporter can't open its own;
 * opening again counts, and so does closing. Where NVIDIA's documentation lists several errors, the
 * one here is the one that its driver was reported to give. */
#include <string.h>
#include <unistd.h>

#include "fake.h"

static const char MAGIC[8] = "kvdfake";

struct handle {
    char magic[8];
    uint64_t allocation;
    uint64_t nonce; /* a handle made up can't be opened */
    char rest[40];
};

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTER_CONTEXT();
    pthread_rwlock_rdlock(&ranges_lock);
    struct range *range = range_at(address);
    bool exportable = range != NULL && range->of.kind == MALLOC && !range->imported;
    struct handle made = {.allocation = exportable ? range->of.id : 0,
                          .nonce = exportable ? range->of.nonce : 0};
    pthread_rwlock_unlock(&ranges_lock);
    if (!exportable) return CUDA_ERROR_INVALID_VALUE;
    memcpy(made.magic, MAGIC, sizeof MAGIC);
    memcpy(handle, &made, sizeof *handle);
    return CUDA_SUCCESS;
}

/* Open it again: the same address, one close more. Under local_lock. */
static bool open_again(uint64_t allocation, CUdeviceptr *address) {
    pthread_rwlock_wrlock(&ranges_lock);
    struct range *range = range_of_allocation(allocation);
    if (range != NULL) {
        range->references++;
        *address = range->base;
    }
    pthread_rwlock_unlock(&ranges_lock);
    return range != NULL;
}

static CUresult open_first(uint64_t allocation, CUdeviceptr *address) {
    CUdevice device = current_context()->device;
    struct range range = {.device = device, .imported = true, .accessible = true, .references = 1};
    CUresult result = hold_allocation(allocation, true, &range.of);
    if (result != CUDA_SUCCESS) return result;
    range.bytes = range.of.bytes;
    range.fd = open_memory(allocation, 0);
    range.base = reserve_addresses(range.bytes, GRANULARITY);
    /* Another device's memory would need peer access; the fake's devices have none. */
    result = range.of.device == machine_device(device) && range.fd >= 0 && range.base != 0
                 ? add_range(range)
                 : CUDA_ERROR_MAP_FAILED;
    if (result == CUDA_SUCCESS) {
        *address = range.base;
        return result;
    }
    if (range.fd >= 0) close(range.fd);
    drop_allocation(allocation, false);
    return result;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle given,
                                      unsigned int flags) {
    ENTER_CONTEXT();
    if (address == NULL || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    if (setting(OPEN_CODE) != 0) return (CUresult)setting(OPEN_CODE);
    struct handle handle;
    struct allocation found;
    memcpy(&handle, &given, sizeof handle);
    bool known = memcmp(handle.magic, MAGIC, sizeof MAGIC) == 0 &&
                 find_allocation(handle.allocation, &found) && found.nonce == handle.nonce;
    if (!known) {
        violation(BAD_HANDLES);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (found.owner == state_me()) return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&local_lock);
    CUresult result = open_again(handle.allocation, address)
                          ? CUDA_SUCCESS
                          : open_first(handle.allocation, address);
    pthread_mutex_unlock(&local_lock);
    if (result == CUDA_SUCCESS) count(IPC_OPENS, 1);
    return result;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER_CONTEXT();
    pthread_mutex_lock(&local_lock);
    pthread_rwlock_wrlock(&ranges_lock);
    struct range *range = range_at(address);
    bool ours = range != NULL && range->imported && range->base == address;
    bool last = ours && --range->references == 0;
    uint64_t allocation = ours ? range->of.id : 0;
    pthread_rwlock_unlock(&ranges_lock);
    if (last) {
        remove_range(address);
        drop_allocation(allocation, false);
    }
    pthread_mutex_unlock(&local_lock);
    if (!ours) {
        violation(BAD_HANDLES);
        return CUDA_ERROR_INVALID_VALUE;
    }
    count(IPC_CLOSES, 1);
    return CUDA_SUCCESS;
}
