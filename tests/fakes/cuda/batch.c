/* cuMemcpyBatchAsync, by both of its signatures: CUDA 12.8's tells which copy failed. */
#include <stdlib.h>

#include "fake.h"

/* Each entry of `first` says from which copy on its attributes hold: 0 first, then upwards. */
static bool attributes_fit(const CUmemcpyAttributes *attributes, const size_t *first, size_t number,
                           size_t copies) {
    if (attributes == NULL || first == NULL || number == 0 || number > copies) return false;
    for (size_t i = 0; i < number; i++) {
        int order = (int)attributes[i].srcAccessOrder;
        if (order < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || order > CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
            return false;
        if (first[i] >= copies || (i == 0 ? first[i] != 0 : first[i] <= first[i - 1])) return false;
    }
    return true;
}

/* A source that may be read out of order is read when the call is made: nothing earlier in the
 * stream has written it by then. */
static bool read_early(const CUmemcpyAttributes *attributes, size_t number) {
    for (size_t i = 0; i < number; i++)
        if (attributes[i].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) return false;
    return true;
}

EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes,
                                      size_t number, CUmemcpyAttributes *attributes, size_t *first,
                                      size_t attributes_number, CUstream stream) {
    ENTER_CONTEXT();
    bool fits = to != NULL && from != NULL && bytes != NULL && number != 0 &&
                !is_null_stream(stream) &&
                attributes_fit(attributes, first, attributes_number, number);
    if (!fits) {
        violation(BAD_BATCHES);
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct rectangle *rectangles = calloc(number, sizeof *rectangles);
    if (rectangles == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; i < number; i++)
        rectangles[i] =
            (struct rectangle){.to = to[i], .from = from[i], .width = bytes[i], .height = 1};
    struct copies copies = {.count = number,
                            .rectangles = rectangles,
                            .counted_as = BATCHES,
                            .any_order = true,
                            .sources_early = read_early(attributes, attributes_number)};
    CUresult result = submit(stream, &copies);
    if (result == CUDA_SUCCESS) count(BATCH_COPIES, (long long)number);
    free(rectangles);
    return result;
}

EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t number,
                                   CUmemcpyAttributes *attributes, size_t *first,
                                   size_t attributes_number, size_t *failed, CUstream stream) {
    CUresult result = cuMemcpyBatchAsync_v2(to, from, bytes, number, attributes, first,
                                            attributes_number, stream);
    if (result != CUDA_SUCCESS && failed != NULL) *failed = SIZE_MAX; /* not one copy's fault */
    return result;
}
