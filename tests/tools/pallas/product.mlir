module {
  func.func @k(%i: i32, %j: i32, %k: i32, %x: memref<256x1024xbf16, #tpu.memory_space<vmem>>, %w: memref<1024x512xbf16, #tpu.memory_space<vmem>>, %o: memref<256x512xbf16, #tpu.memory_space<vmem>>) attributes {iteration_bounds = array<i64: 2, 4, 2>, scalar_prefetch = 0 : i64, scratch_operands = 0 : i64, window_params = [{transform_indices = @x, window_bounds = array<i64: 256, 1024>}, {transform_indices = @w, window_bounds = array<i64: 1024, 512>}, {transform_indices = @o, window_bounds = array<i64: 256, 512>}]} {
    %c0 = arith.constant 0 : index
    %a = vector.load %x[%c0, %c0] : memref<256x1024xbf16, #tpu.memory_space<vmem>>, vector<256x1024xbf16>
    %b = vector.load %w[%c0, %c0] : memref<1024x512xbf16, #tpu.memory_space<vmem>>, vector<1024x512xbf16>
    %z = arith.constant dense<0.000000e+00> : vector<256x512xf32>
    %y = "stable_mosaic.tpu.matmul"(%a, %b, %z) {dimension_numbers = #tpu.dot_dimension_numbers<[1], [0], [0], [1], [0, 0, 1, 1], [], []>} : (vector<256x1024xbf16>, vector<1024x512xbf16>, vector<256x512xf32>) -> vector<256x512xf32>
    return
  }
  func.func @x(%i: i32, %j: i32, %k: i32) -> (i32, i32) {
    return %i, %k : i32, i32
  }
  func.func @w(%i: i32, %j: i32, %k: i32) -> (i32, i32) {
    return %k, %j : i32, i32
  }
  func.func @o(%i: i32, %j: i32, %k: i32) -> (i32, i32) {
    return %i, %j : i32, i32
  }
}
