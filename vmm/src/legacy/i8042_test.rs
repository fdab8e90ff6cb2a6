use super::*;

#[test]
fn only_the_reset_command_resets() {
    assert!(write(0x64, 0xfe));
    assert!(!write(0x64, 0xaa), "the self test's command");
    assert!(!write(0x60, 0xfe), "data");
}

#[test]
fn a_command_may_always_be_written() {
    // Bit 1 of the status: the controller has not yet read the last byte.
    assert_eq!(read(0x64) & 2, 0);
}
