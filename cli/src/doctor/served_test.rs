use super::*;

#[test]
fn the_room_is_told_and_advice_comes_when_little_is_left() {
    let sizes = Sizes {
        slots: 1_024,
        vms: 80,
        rules: 90,
    };
    let roomy = room(sizes, 3, 12, 7);
    assert_eq!(
        roomy.found,
        "3 of 80 VMs, 12 of 90 places for rules used so far, 7 of 1024 flows"
    );
    assert_eq!(roomy.state, State::Ok);
    let remedy = |vms, flows| room(sizes, vms, 90, flows).remedy.unwrap_or_default();
    assert!(remedy(75, 7).contains("give --max-vms more"));
    assert!(remedy(3, 1_000).contains("give --flow-table more"));
    assert!(remedy(80, 1_024).contains("--max-vms and --flow-table"));
    assert_eq!(remedy(69, 800), "");
}
