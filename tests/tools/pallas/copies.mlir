module {
  func.func @k(%x: memref<1024x512xf32, #tpu.memory_space<any>>, %n: memref<1xi32, #tpu.memory_space<smem>>, %o: memref<128x512xf32, #tpu.memory_space<vmem>>, %buffer: memref<128x512xf32, #tpu.memory_space<vmem>>, %sem: memref<!tpu.dma_semaphore, #tpu.memory_space<semaphore_mem>>) attributes {scalar_prefetch = 0 : i64, scratch_operands = 2 : i64} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c128 = arith.constant 128 : i32
    %zero = arith.constant 0 : index
    %length = memref.load %n[%zero] : memref<1xi32, #tpu.memory_space<smem>>
    %last = arith.divsi %length, %c128 : i32
    scf.for %i = %c0 to %last step %c1 : i32 {
      %at = arith.muli %i, %c128 : i32
      %part = "stable_mosaic.tpu.memref_slice"(%x, %at, %c0) : (memref<1024x512xf32, #tpu.memory_space<any>>, i32, i32) -> memref<128x512xf32, #tpu.memory_space<any>>
      "stable_mosaic.tpu.enqueue_dma"(%part, %buffer, %sem) {operandSegmentSizes = array<i32: 1, 0, 1, 1, 0, 0, 0>} : (memref<128x512xf32, #tpu.memory_space<any>>, memref<128x512xf32, #tpu.memory_space<vmem>>, memref<!tpu.dma_semaphore, #tpu.memory_space<semaphore_mem>>) -> ()
    }
    return
  }
}
