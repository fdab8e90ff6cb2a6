use super::*;
use crate::Action;

const CLOSED: &str =
    "default = \"deny\"\nrules = [{ allow = \"example.com:443\" }, { deny = \"192.0.2.0/24\" }]\n";

fn none(_: &Path) -> std::io::Result<String> {
    Err(std::io::ErrorKind::NotFound.into())
}

#[test]
fn a_policy_is_loaded_alone_with_the_flags_before_it_and_the_files_resolvers() {
    let text =
        "default = \"allow\"\n[dns]\nresolvers = \"none\"\n[policy.b]\ndefault = \"allow\"\n";
    let base = PolicyFile::parse(Path::new("p.toml"), text.to_owned()).unwrap();
    let put = PutPolicy::parse("a", CLOSED, Some(&base)).unwrap();
    assert_eq!(put.text(), CLOSED);
    let typed = CliOverrides {
        rules: vec![crate::document::RuleFlag::Match(
            Action::Deny,
            "10.0.0.0/8".into(),
        )],
        ..CliOverrides::default()
    };
    let loaded = put.load(&typed, &none).unwrap();
    assert_eq!(loaded.settings.name.as_deref(), Some("a"));
    assert_eq!(loaded.settings.dns.resolvers, crate::Resolvers::Nobody);
    assert_eq!((loaded.default, loaded.rules.len()), (Action::Deny, 3));
    assert_eq!(loaded.rules[1].note.place.as_deref(), Some("a:2"));
    // Read again, it is the same.
    let again = PutPolicy::parse("a", CLOSED, Some(&base)).unwrap();
    assert_eq!(again.load(&typed, &none).unwrap(), loaded);
    let alone = PutPolicy::parse("a", CLOSED, None).unwrap();
    let alone = alone.load(&CliOverrides::default(), &none).unwrap();
    assert_eq!(alone.settings.dns.resolvers, crate::Resolvers::Host);
}

#[test]
fn what_can_be_read_and_not_be_used_is_refused_with_its_line() {
    for (text, part) in [
        ("rules = []\n", "has no default"),
        (
            "default = \"deny\"\nrules = [{ allow = \"300.0.0.1\" }]\n",
            "a:2",
        ),
        ("default = \"deny\"\n[dns]\nmax_labels = 0\n", "a:3"),
    ] {
        let put = PutPolicy::parse("a", text, None);
        let error = put.and_then(|put| put.load(&CliOverrides::default(), &none));
        let error = error.unwrap_err().to_string();
        assert!(error.contains(part), "{text:?}: {error}");
    }
}

#[test]
fn what_is_no_policy_is_refused_with_its_line() {
    check_named("a", CLOSED).unwrap();
    for (name, text, part) in [
        ("a/b", CLOSED, "can't be a name"),
        ("a", "default = \"deny\"\ncolour = 1\n", "a:2"),
        ("a", "default = ", "a:1"),
        ("a", "default = \"deny\"\n[vms]\nx = \"a\"\n", "vms"),
        (
            "a",
            "default = \"deny\"\nrules = [{ deny_file = \"/etc/shadow\" }]\n",
            "deny_file",
        ),
    ] {
        let error = check_named(name, text).unwrap_err().to_string();
        assert!(error.contains(part), "{text:?}: {error}");
    }
}
