use slipgate_broker::config::PolicyFlags;

use super::tests::config;

fn said(flags: &str) -> PolicyFlags {
    config(flags).unwrap().policy_flags()
}

#[test]
fn each_flag_about_policies_counts_and_others_do_not() {
    let plain = said("--tap t0 --tap t1");
    assert!(plain.agrees(&said("--tap t1 --tap t0 --nat-ports 40000-50000")));
    let other = [
        "--tap t0",
        "--tap t0 --tap t1 --deny 192.0.2.1",
        "--tap t0 --tap t1 --default deny",
        "--tap t0 --tap t1 --max-flows 5",
        "--tap t0 --tap t1 --new-flows-per-second 5",
        "--tap t0 --tap t1 --dns-per-second 5",
        "--tap t0 --tap t1 --tx-bytes-per-second 5",
        "--tap t0 --tap t1 --rx-bytes-per-second 5",
        "--tap t0 --tap t1 --tx-packets-per-second 5",
        "--tap t0 --tap t1 --rx-packets-per-second 5",
        "--tap t0 --tap t1 --dns 192.0.2.53",
        "--tap t0 --tap t1 --host-loopback 8080",
        "--tap t0 --tap t1 --host-loopback 8080:80",
        "--tap t0 --tap t1 --egress-routes host",
        "--tap t0 --tap t1 --egress-routes uplink",
        "--vm name=t0,tap=t0,max-flows=5 --tap t1",
    ];
    for (index, flags) in other.iter().enumerate() {
        let said_here = said(flags);
        assert!(!said_here.agrees(&plain), "{flags}");
        for another in &other[..index] {
            assert!(!said_here.agrees(&said(another)), "{flags} and {another}");
        }
        // What is kept of it is all of it.
        let kept = serde_json::to_string(&said_here).unwrap();
        assert_eq!(
            serde_json::from_str::<PolicyFlags>(&kept).unwrap(),
            said_here
        );
    }
    let allow_first = said("--tap t0 --allow 192.0.2.1 --deny 192.0.2.1");
    assert!(!allow_first.agrees(&said("--tap t0 --deny 192.0.2.1 --allow 192.0.2.1")));
}
