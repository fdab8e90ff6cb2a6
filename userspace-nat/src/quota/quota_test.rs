use super::*;

#[test]
fn the_world_never_has_all_but_of_one() {
    let shares = [0, 1, 2, 3, 4, 8, 16_384, u32::MAX].map(worlds_share);
    assert_eq!(shares, [0, 1, 1, 2, 3, 6, 12_288, 3_221_225_471]);
}
