use std::path::Path;

use slipgate_policy::document::PolicyFile;

use super::*;

/// The error of user mode for a policy file with this text, and this flag.
fn refused(text: &str, egress_routes: Option<RoutesOf>) -> Option<String> {
    let text = format!("default = \"allow\"\n{text}\n");
    let file = PolicyFile::parse(Path::new("p.toml"), text).unwrap();
    let flags = CliOverrides {
        egress_routes,
        ..CliOverrides::default()
    };
    let none = |_: &Path| unreachable!("no file is named");
    let loaded = LoadedPolicies::of(&flags, Some(&file), &none).unwrap();
    let checked = check_egress(&flags, &loaded);
    checked.err().map(|e| e.to_string())
}

#[test]
fn an_error_about_egress_names_what_said_it() {
    assert_eq!(refused("", None), None);
    assert_eq!(refused("", Some(RoutesOf::Uplink)), None);
    let by_flag = refused("", Some(RoutesOf::Host)).unwrap();
    assert!(by_flag.contains("--egress-routes"), "{by_flag}");
    assert!(!by_flag.contains("--policy"), "{by_flag}");
    for said in [
        "egress.routes = \"host\"",
        "nat_addresses = [\"192.0.2.8\"]",
    ] {
        let by_policy = refused(said, None).unwrap();
        assert!(by_policy.contains("--policy"), "{by_policy}");
        assert!(by_policy.contains("p.toml"), "{by_policy}");
    }
}
