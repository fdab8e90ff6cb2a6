use super::*;

#[test]
fn a_mark_says_where_a_frame_goes_and_how() {
    for ifindex in [1, 7, i32::MAX as u32] {
        for by_neighbour in [false, true] {
            let onward = Onward {
                ifindex,
                by_neighbour,
            };
            assert_eq!(Onward::of_mark(onward.mark()), Some(onward));
        }
    }
    assert_eq!(Onward::of_mark(0), None);
    assert_eq!(Onward::of_mark(1 << 31), None);
}
