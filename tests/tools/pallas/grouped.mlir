module {
  func.func @k(%i: i32, %j: i32, %ids: memref<VISITSxi32, #tpu.memory_space<smem>>, %tiles: memref<VISITSxi32, #tpu.memory_space<smem>>, %x: memref<TILEx2048xbf16, #tpu.memory_space<vmem>>, %w: memref<1x2048x1024xbf16, #tpu.memory_space<vmem>>, %o: memref<TILEx1024xbf16, #tpu.memory_space<vmem>>) attributes {iteration_bounds = array<i64: 1, -9223372036854775808>, scalar_prefetch = 2 : i64, scratch_operands = 0 : i64, window_params = [{transform_indices = @x, window_bounds = array<i64: TILE, 2048>}, {transform_indices = @w, window_bounds = array<i64: 1, 2048, 1024>}, {transform_indices = @o, window_bounds = array<i64: TILE, 1024>}]} {
    return
  }
  func.func @x(%i: i32, %j: i32, %ids: memref<VISITSxi32, #tpu.memory_space<smem>>, %tiles: memref<VISITSxi32, #tpu.memory_space<smem>>) -> (i32, i32) {
    %c0 = arith.constant 0 : i32
    %a = arith.index_cast %j : i32 to index
    %b = memref.load %tiles[%a] : memref<VISITSxi32, #tpu.memory_space<smem>>
    return %b, %c0 : i32, i32
  }
  func.func @w(%i: i32, %j: i32, %ids: memref<VISITSxi32, #tpu.memory_space<smem>>, %tiles: memref<VISITSxi32, #tpu.memory_space<smem>>) -> (i32, i32, i32) {
    %c0 = arith.constant 0 : i32
    %a = arith.index_cast %j : i32 to index
    %b = memref.load %ids[%a] : memref<VISITSxi32, #tpu.memory_space<smem>>
    return %b, %c0, %i : i32, i32, i32
  }
  func.func @o(%i: i32, %j: i32, %ids: memref<VISITSxi32, #tpu.memory_space<smem>>, %tiles: memref<VISITSxi32, #tpu.memory_space<smem>>) -> (i32, i32) {
    %a = arith.index_cast %j : i32 to index
    %b = memref.load %tiles[%a] : memref<VISITSxi32, #tpu.memory_space<smem>>
    return %b, %i : i32, i32
  }
}
