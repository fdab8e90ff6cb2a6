use super::*;

#[test]
fn off_is_s5_with_the_enable_bit() {
    let s5 = layout::SLEEP_TYPE_S5 << 2;
    assert!(write(layout::ports::SLEEP_CONTROL, s5 | 0x20));
    assert!(!write(layout::ports::SLEEP_CONTROL, s5), "without SLP_EN");
    let s3 = (layout::SLEEP_TYPE_S5 ^ 1) << 2;
    assert!(
        !write(layout::ports::SLEEP_CONTROL, s3 | 0x20),
        "another sleep"
    );
    assert!(
        !write(layout::ports::SLEEP_STATUS, s5 | 0x20),
        "the status register"
    );
}
