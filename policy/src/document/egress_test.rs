use std::path::Path;

use super::*;
use crate::document::{LoadedPolicies, LoadedPolicy};

fn load(text: &str) -> Result<LoadedPolicy, ConfigError> {
    let file = PolicyFile::parse(Path::new("p.toml"), text.to_owned())?;
    let none = |_: &Path| unreachable!("no file is named");
    let all = LoadedPolicies::of(&Default::default(), Some(&file), &none)?;
    Ok(all.policies.into_iter().next_back().unwrap())
}

#[test]
fn a_policy_has_addresses_and_a_device() {
    let loaded = load(
        "default = \"allow\"\nnat_addresses = [\"198.51.100.8/30\", \"2001:db8::1\"]\n\
         [egress]\nuplink = \"wg0\"\n\
         [policy.other]\ndefault = \"deny\"\n",
    )
    .unwrap();
    assert!(loaded.settings.nat_addresses.is_empty());
    assert_eq!(loaded.settings.egress, Egress::default());
    let loaded = load(
        "[policy.web]\ndefault = \"deny\"\nnat_addresses = [\"198.51.100.8/30\"]\n\
         egress.uplink = \"wg0\"\n",
    )
    .unwrap();
    assert_eq!(loaded.settings.nat_addresses.addresses().count(), 4);
    assert_eq!(loaded.settings.egress.uplink.as_deref(), Some("wg0"));
}

#[test]
fn a_policy_has_routes_of_a_table_a_vrf_or_a_mark() {
    let routes = |said: &str| {
        let text = format!("default = \"allow\"\n[egress]\n{said}\n");
        load(&text).unwrap().settings.egress.routes
    };
    assert_eq!(routes(""), None);
    assert_eq!(routes("table = 100"), Some(EgressRoutes::Table(100)));
    let vrf = Some(EgressRoutes::Vrf("blue".to_owned()));
    assert_eq!(routes("table = \"blue\""), vrf);
    assert_eq!(routes("mark = 0x10"), Some(EgressRoutes::Mark(16)));
    let both = "default = \"allow\"\negress = { uplink = \"wg0\", mark = 1 }\n";
    let both = load(both).unwrap().settings.egress;
    assert_eq!(both.uplink.as_deref(), Some("wg0"));
    assert_eq!(both.routes.unwrap().to_string(), "mark 0x1");
}

#[test]
fn a_policy_has_the_hosts_routes_by_its_file_or_by_the_flag() {
    let of = |flag, said: &str| {
        let text = format!("default = \"allow\"\n[egress]\n{said}\n");
        let file = PolicyFile::parse(Path::new("p.toml"), text).unwrap();
        let typed = crate::document::CliOverrides {
            egress_routes: flag,
            ..Default::default()
        };
        let none = |_: &Path| unreachable!("no file is named");
        let all = LoadedPolicies::of(&typed, Some(&file), &none).unwrap();
        all.policies[0].settings.egress.routes.clone()
    };
    let host = |mark| Some(EgressRoutes::Host { mark });
    assert_eq!(of(None, "routes = \"host\""), host(0));
    assert_eq!(of(None, "routes = \"host\"\nmark = 7"), host(7));
    assert_eq!(of(None, "routes = \"uplink\""), None);
    let flag = Some(RoutesOf::Host);
    assert_eq!(of(flag, ""), host(0));
    // What a policy says beats the flag.
    assert_eq!(of(flag, "routes = \"uplink\""), None);
    assert_eq!(of(flag, "table = 100"), Some(EgressRoutes::Table(100)));
    assert_eq!(of(flag, "mark = 7"), Some(EgressRoutes::Mark(7)));
    assert_eq!(of(Some(RoutesOf::Uplink), ""), None);
    assert_eq!(by_flag(flag).routes, host(0));
    assert_eq!(host(0).unwrap().to_string(), "the host");
    assert_eq!(host(7).unwrap().to_string(), "the host with mark 0x7");
}

#[test]
fn errors_give_the_place_and_say_what_to_do() {
    let says = |text: &str| {
        load(&format!("default = \"deny\"\n{text}\n"))
            .unwrap_err()
            .to_string()
    };
    for (text, words) in [
        (
            "nat_addresses = [\"198.51.100.8\", \"198.51.100.9/30\"]",
            ["p.toml:2:34", "beyond"],
        ),
        (
            "nat_addresses = [\"wg0\"]",
            ["p.toml:2:18", "not an address"],
        ),
        ("nat_addresses = [\"10.0.0.0/8\"]", ["p.toml:2:18", "1024"]),
        (
            "[egress]\nuplink = \"no/device\"",
            ["p.toml:3:10", "network device"],
        ),
        ("[egress]\ndevice = \"wg0\"", ["p.toml:3:1", "device"]),
        (
            "[egress]\ntable = \"no/vrf\"",
            ["p.toml:3:9", "network device"],
        ),
        ("[egress]\ntable = 254", ["p.toml:3:9", "main"]),
        ("[egress]\ntable = true", ["p.toml:3:9", "VRF"]),
        ("[egress]\nmark = 0", ["p.toml:3:8", "ip rule"]),
        ("[egress]\nmark = 4294967296", ["p.toml:3:8", "u32"]),
        (
            "[egress]\ntable = 100\nmark = 7",
            ["p.toml:4:8", "one of the two"],
        ),
        (
            "[egress]\ntable = 100\nroutes = \"host\"",
            ["p.toml:4:10", "one of the two"],
        ),
        ("[egress]\nroutes = \"any\"", ["p.toml:3:10", "host"]),
    ] {
        let error = says(text);
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

#[test]
fn a_vms_own_addresses_are_read_as_a_policys() {
    let of = |texts: &[&str]| {
        let texts: Vec<String> = texts.iter().map(ToString::to_string).collect();
        pool_of_vm(&texts)
    };
    assert_eq!(of(&["198.51.100.9"]).unwrap().addresses().count(), 1);
    assert!(of(&[]).unwrap().is_empty());
    let error = of(&["198.51.100.9", "there"]).unwrap_err().to_string();
    assert!(
        error.contains("nat_addresses") && error.contains("there"),
        "{error}"
    );
}
