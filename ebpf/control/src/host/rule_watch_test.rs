use super::*;
use crate::testing::{in_netns, run};

#[test]
fn rules_are_noticed_and_elements_of_sets_are_not() {
    in_netns("rules_are_noticed", || {
        let watch = RuleWatch::open().unwrap();
        assert!(!watch.take().unwrap());
        run("nft add table ip own");
        assert!(watch.take().unwrap());
        run("nft add chain ip own out { type nat hook postrouting priority 100 ; }");
        run("nft add set ip own some { type ipv4_addr ; }");
        watch.take().unwrap();
        for change in [
            "add rule ip own out masquerade",
            "flush chain ip own out",
            "add rule ip own out oifname eth0 masquerade",
            "delete table ip own",
        ] {
            run("nft add element ip own some { 192.0.2.1 }");
            assert!(!watch.take().unwrap(), "an element before {change}");
            run("nft delete element ip own some { 192.0.2.1 }");
            assert!(!watch.take().unwrap(), "an element before {change}");
            run(&format!("nft {change}"));
            assert!(watch.take().unwrap(), "{change}");
        }
    });
}

#[test]
fn notices_that_were_lost_count_as_changes() {
    in_netns("notices_that_were_lost", || {
        let watch = RuleWatch::open().unwrap();
        run("nft add table ip own");
        run("nft add set ip own some { type ipv4_addr ; flags interval ; }");
        watch.take().unwrap();
        // Far more than the buffer of a socket has room for.
        let all: Vec<String> = (0..16_000u32)
            .map(|n| format!("10.{}.{}.0", n >> 8, n & 255))
            .collect();
        let file = std::env::temp_dir().join(format!("slipgate-elements-{}", std::process::id()));
        let elements = format!("add element ip own some {{ {} }}", all.join(", "));
        std::fs::write(&file, elements).unwrap();
        run(&format!("nft -f {}", file.display()));
        std::fs::remove_file(&file).unwrap();
        assert!(watch.take().unwrap());
        assert!(!watch.take().unwrap());
    });
}
