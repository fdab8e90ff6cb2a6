use super::*;

#[test]
fn a_way_out_is_looked_at_once_for_all_its_vms() {
    let mut looks = Vec::new();
    let mut leading = PerWayOut::default();
    let by = |uplink, routes: Option<EgressRoutes>| WayOut {
        uplink: Some(IfIndex::new(uplink)),
        routes,
        from: None,
    };
    let [a, b] = [2, 3].map(|uplink| by(uplink, None));
    let by_routes = by(2, Some(EgressRoutes::Host { mark: 0 }));
    for way in [&a, &b, &a, &a, &by_routes, &b, &by_routes] {
        let leads = leading.of(way.clone(), |way| {
            looks.push(way.clone());
            *way == a
        });
        assert_eq!(leads, *way == a);
    }
    assert_eq!(looks, [a, b, by_routes]);
}
