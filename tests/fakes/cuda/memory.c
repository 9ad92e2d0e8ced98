/* Device memory by cuMemAlloc and its kin, and what a pointer is. */
#include <string.h>

#include "fake.h"

struct CUmemPoolHandle_st {
    CUdevice device;
    int handle_types;
};

static struct CUmemPoolHandle_st default_pools[MOST_DEVICES];

static CUresult allocate(CUdeviceptr *address, size_t bytes, enum kind kind, CUmemoryPool pool) {
    ENTER_CONTEXT();
    if (address == NULL || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    struct range range = {.bytes = bytes, .pool = pool};
    CUresult result = take_and_map(&range, kind, pool == NULL ? 0 : pool->handle_types);
    if (result == CUDA_SUCCESS) *address = range.base;
    return result;
}

/* Copies that are queued still reach what is freed: as with CUDA, freeing waits for them. */
static CUresult give_back(CUdeviceptr address, bool of_pool_only) {
    ENTER_CONTEXT();
    if (address == 0) return CUDA_SUCCESS;
    drain_streams();
    pthread_rwlock_rdlock(&ranges_lock);
    struct range *range = range_at(address), found = {0};
    if (range != NULL) found = *range;
    pthread_rwlock_unlock(&ranges_lock);
    bool ours = range != NULL && found.base == address && !found.imported && found.of.kind != VMM;
    if (!ours || (of_pool_only && found.of.kind != POOL)) {
        violation(USE_AFTER_FREE);
        return CUDA_ERROR_INVALID_VALUE;
    }
    remove_range(address);
    drop_allocation(found.of.id, true);
    return sticky_error();
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    return allocate(address, bytes, MALLOC, NULL);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) { return give_back(address, false); }

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags) {
    if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    return allocate(address, bytes, MANAGED, NULL);
}

/* -- memory pools: allocated at once, freed once the device is idle -- */

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    ENTER();
    if (device < 0 || device >= MOST_DEVICES) return CUDA_ERROR_INVALID_DEVICE;
    *pool = &default_pools[device];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream) {
    ENTER_CONTEXT();
    CUresult result = check_stream(stream);
    if (result != CUDA_SUCCESS) return result;
    return allocate(address, bytes, POOL, &default_pools[current_context()->device]);
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool,
                                        CUstream stream) {
    ENTER_CONTEXT();
    CUresult result = check_stream(stream);
    if (result != CUDA_SUCCESS) return result;
    if (pool == NULL) return CUDA_ERROR_INVALID_VALUE;
    return allocate(address, bytes, POOL, pool);
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    ENTER_CONTEXT();
    CUresult result = check_stream(stream);
    return result == CUDA_SUCCESS ? give_back(address, true) : result;
}

/* -- what a pointer is -- */

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    ENTER_CONTEXT();
    pthread_rwlock_rdlock(&ranges_lock);
    struct range *range = range_at(address);
    if (range != NULL && base != NULL) *base = range->base;
    if (range != NULL && bytes != NULL) *bytes = range->bytes;
    pthread_rwlock_unlock(&ranges_lock);
    return range == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

/* Attributes of a device address; the value's size is the attribute's. */
static CUresult device_attribute(void *value, CUpointer_attribute attribute,
                                 const struct range *range, CUdeviceptr address) {
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = current_context(); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (range->of.kind != MANAGED) return CUDA_ERROR_INVALID_VALUE;
        *(void **)value = (void *)address;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)value = range->of.id; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)value = range->of.kind == MANAGED; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = range->device; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(bool *)value = range->of.kind == MALLOC && !range->imported;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)value = range->base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = range->bytes; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(bool *)value = true; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(unsigned long long *)value = (unsigned)range->of.handle_types;
        break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)value = range->pool; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

static CUresult host_attribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    uint64_t base;
    size_t bytes;
    if (!registration_of(address, &base, &bytes)) return CUDA_ERROR_INVALID_VALUE;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = current_context(); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = CU_MEMORYTYPE_HOST; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(CUdeviceptr *)value = address; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)value = 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = current_context()->device; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(bool *)value = false; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)value = base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = bytes; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(bool *)value = true; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)value = 0; break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)value = NULL; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute,
                                      CUdeviceptr address) {
    ENTER_CONTEXT();
    if (value == NULL) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device_address(address)) return host_attribute(value, attribute, address);
    pthread_rwlock_rdlock(&ranges_lock);
    struct range *range = range_at(address);
    CUresult result = range == NULL ? CUDA_ERROR_INVALID_VALUE
                                    : device_attribute(value, attribute, range, address);
    pthread_rwlock_unlock(&ranges_lock);
    return result;
}

/* Unlike the call for one attribute, this one answers zeros for what it does not know. */
EXPORT CUresult cuPointerGetAttributes(unsigned int number, CUpointer_attribute *attributes,
                                       void **values, CUdeviceptr address) {
    ENTER_CONTEXT();
    for (unsigned i = 0; i < number; i++) {
        if (cuPointerGetAttribute(values[i], attributes[i], address) == CUDA_SUCCESS) continue;
        bool is_small = attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ||
                        attributes[i] == CU_POINTER_ATTRIBUTE_IS_MANAGED;
        bool is_flag = attributes[i] == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE ||
                       attributes[i] == CU_POINTER_ATTRIBUTE_MAPPED;
        if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
            *(int *)values[i] = -2;
        else
            memset(values[i], 0, is_flag ? 1 : is_small ? 4 : 8);
    }
    return CUDA_SUCCESS;
}
