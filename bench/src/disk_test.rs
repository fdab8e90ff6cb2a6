use serde_json::json;

use super::*;

#[test]
fn a_guest_s_line_gives_rate_percentiles_and_cpu_time_of_a_read() {
    let said = json!({"workload": "disk", "count": 4000, "took_us": 200_000.0, "p50_us": 33.0,
        "p99_us": 78.0});
    let figures = figures(&said, Duration::from_millis(64)).unwrap();
    assert_eq!(figures, [20.0, 33.0, 78.0, 16.0]);
}

#[test]
fn a_failed_read_is_no_figure() {
    let said = json!({"workload": "disk", "count": 9, "error": "byte 7 is wrong"});
    let why = figures(&said, Duration::ZERO).unwrap_err().to_string();
    assert!(why.contains("byte 7 is wrong"), "{why}");
}

#[test]
fn threads_that_carry_reads_out_are_known_by_their_names() {
    let qemu = Contender::Qemu("threads");
    assert!(qemu.is_device("IO io") && qemu.is_device("worker"));
    assert!(!qemu.is_device("CPU 0/KVM") && !qemu.is_device("qemu-system-x86"));
    assert!(Contender::Slipgate.is_device("disk0-0"));
    assert!(Contender::Slipgate.is_device("iou-wrk-4711"));
    assert!(!Contender::Slipgate.is_device("vcpu0") && !Contender::Slipgate.is_device("net0"));
}

#[test]
fn a_guest_writes_each_block_of_the_image_once_with_a_flush_behind_each_64() {
    assert_eq!(
        work(Action::Write, 32_768, 32),
        "address 10.0.2.15/24 10.0.2.2; disk 0 scatter 262144 64 x32; \
         disk 0 scatter 134217728 64 x32; wait 60s"
    );
}
