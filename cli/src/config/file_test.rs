use super::*;

fn flags_of(text: &str) -> Result<Vec<String>, String> {
    let flags = flags(Path::new("slipgate.toml"), text).map_err(|e| e.to_string())?;
    Ok(flags
        .into_iter()
        .map(|flag| flag.into_string().unwrap())
        .collect())
}

#[test]
fn keys_are_flags() {
    let text = "uplink = \"eth0\"\nmax-flows = 100\nbpf-log = true\ndns = [\"192.0.2.1\", \"192.0.2.2\"]\n";
    assert_eq!(
        flags_of(text).unwrap(),
        [
            "--bpf-log",
            "--dns=192.0.2.1",
            "--dns=192.0.2.2",
            "--max-flows=100",
            "--uplink=eth0"
        ]
    );
    assert_eq!(flags_of("bpf-log = false").unwrap(), Vec::<String>::new());
}

#[test]
fn what_is_no_flag_is_named() {
    for (text, part) in [
        ("colour = 1", "no flag --colour"),
        ("config = \"other.toml\"", "no flag --config"),
        ("vm = \"name=a,tap=b\"", "no flag --vm"),
        ("mtu = 1.5", "mtu: that is no value"),
        ("dns = [[\"a\"]]", "dns: that is no value"),
        ("allow = \"a\"", "allow: rules have an order"),
        ("uplink = ", "slipgate.toml"),
    ] {
        let error = flags_of(text).unwrap_err();
        assert!(error.contains(part), "{text}: {error}");
    }
}
