#![no_main]
libfuzzer_sys::fuzz_target!(|input: &[u8]| slipgate_fuzz::vsock(input));
