use super::*;

#[test]
fn an_uplink_is_looked_at_once_for_all_its_vms() {
    let mut looks = Vec::new();
    let mut leading = PerUplink::default();
    let [a, b] = [2, 3].map(IfIndex::new);
    for uplink in [a, b, a, a, b] {
        let leads = leading.of(uplink, |uplink| {
            looks.push(uplink);
            uplink == a
        });
        assert_eq!(leads, uplink == a);
    }
    assert_eq!(looks, [a, b]);
}
