use super::*;

#[test]
fn shares_fit_the_queue_and_half_of_it_is_anybodys() {
    for vms in (0..=DEFAULT_VMS as usize).chain([65_535, 100_000]) {
        let (share, common) = division(vms);
        assert!((1..=MOST_CREDITS).contains(&share), "{vms}: {share}");
        if vms <= DEFAULT_VMS as usize {
            // All have their shares queued, and others took what was common before.
            assert!(share * vms as u32 + common <= QUEUED, "{vms}");
            assert!(common >= QUEUED / 2, "{vms}: {common}");
        }
    }
    assert_eq!(division(1), (512, 7_680));
    assert_eq!(division(33).0, 124);
    assert_eq!(division(1_000), (4, 4_192));
    assert_eq!(division(4_096), (1, 4_096));
    assert_eq!(division(65_535), (1, 0));
}
