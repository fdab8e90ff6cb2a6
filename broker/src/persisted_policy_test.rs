use slipgate_policy::{
    Action,
    document::{CliOverrides, RoutesOf, RuleFlag},
};

use super::*;
use crate::config::tests;

/// A command line that names a policy file, and denies these besides.
fn config(file: &Path, denied: &[&str]) -> Config {
    let deny = |rule: &&str| RuleFlag::Match(Action::Deny, (*rule).to_owned());
    let typed = CliOverrides {
        file: Some(file.to_owned()),
        rules: denied.iter().map(deny).collect(),
        ..CliOverrides::default()
    };
    tests::config(&["tap0"], typed)
}

struct Files {
    dir: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let files = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        files.write("list.txt", "203.0.113.0/24\n");
        let other = "default = \"deny\"\nrules = [{ deny_file = \"list.txt\" }]\n";
        files.write("other.toml", other);
        files.write("given.toml", "default = \"allow\"\n");
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// `other.toml` is applied over this command line, and kept.
    fn apply(&self, config: &Config) {
        let other = config.with_policy_file(&self.path("other.toml")).unwrap();
        let loaded = other.load_policies().unwrap();
        let said = config.policy_flags();
        keep(&self.path("kept"), &said, &other, || loaded.deny_files()).unwrap();
    }
}

#[test]
fn the_same_command_line_goes_on_with_what_was_applied_as_it_was_then() {
    let files = Files::new();
    let given = files.path("given.toml");
    let config = config(&given, &[]);
    files.apply(&config);
    // Whatever became of the files.
    fs::remove_file(files.path("other.toml")).unwrap();
    files.write("list.txt", "no address\n");
    let (now, loaded, policies) = take_over(&files.path("kept"), &config).unwrap().unwrap();
    assert_eq!(
        now.policy_name(),
        files.path("other.toml").display().to_string()
    );
    assert_eq!(loaded.policies[0].rules.len(), 1);
    let texts: Vec<String> = policies.texts().collect();
    assert!(texts[0].contains("deny"), "{texts:?}");
}

#[test]
fn another_command_line_holds_and_what_was_kept_waits_for_its_start() {
    let files = Files::new();
    let given = files.path("given.toml");
    let first = config(&given, &[]);
    files.apply(&first);
    let more = config(&given, &["198.51.100.7"]);
    let other = take_over(&files.path("kept"), &more).unwrap();
    assert!(other.is_none());
    // That one did not come to serve: the first, started again, goes on.
    assert!(take_over(&files.path("kept"), &first).unwrap().is_some());
}

#[test]
fn whose_routes_flows_leave_by_outlives_a_restart_and_another_flag_for_it_holds() {
    let files = Files::new();
    let given = files.path("given.toml");
    let by = |routes: Option<RoutesOf>| {
        let typed = CliOverrides {
            file: Some(given.clone()),
            egress_routes: routes,
            ..CliOverrides::default()
        };
        tests::config(&["tap0"], typed)
    };
    let host = by(Some(RoutesOf::Host));
    files.apply(&host);
    let (now, loaded, _) = take_over(&files.path("kept"), &host).unwrap().unwrap();
    assert!(now.policy_name().ends_with("other.toml"));
    let egress = |loaded: &LoadedPolicies| loaded.policies[0].settings.egress.clone();
    assert_eq!(egress(&loaded), egress(&host.load_policies().unwrap()));
    assert_ne!(egress(&loaded), egress(&by(None).load_policies().unwrap()));
    for other in [by(None), by(Some(RoutesOf::Uplink))] {
        let taken = take_over(&files.path("kept"), &other).unwrap();
        assert!(taken.is_none(), "the flag is another");
    }
}

#[test]
fn what_another_version_kept_stays_in_force() {
    let files = Files::new();
    let given = files.path("given.toml");
    let kept = files.path("kept");
    let more = config(&given, &["198.51.100.7"]);
    for change in [
        |kept: &mut serde_json::Value| kept["version"] = 7.into(),
        |kept: &mut serde_json::Value| drop(kept.as_object_mut().unwrap().remove("version")),
        |kept: &mut serde_json::Value| kept["command_line"]["new_flag"] = "x".into(),
        |kept: &mut serde_json::Value| kept["command_line"] = "Typed { rules: [] }".into(),
    ] {
        files.apply(&config(&given, &[]));
        let mut json = serde_json::from_slice(&fs::read(&kept).unwrap()).unwrap();
        change(&mut json);
        fs::write(&kept, json.to_string()).unwrap();
        let (now, ..) = take_over(&kept, &more).unwrap().expect("what was applied");
        assert!(now.policy_name().ends_with("other.toml"));
    }
}

#[test]
fn the_command_lines_file_by_another_name_is_read_again_and_not_kept() {
    let files = Files::new();
    let (given, link) = (files.path("given.toml"), files.path("link.toml"));
    std::os::unix::fs::symlink(&given, &link).unwrap();
    let config = config(&link, &[]);
    let said = config.policy_flags();
    let kept = files.path("kept");
    // It, as such; and after another one.
    let other = config.with_policy_file(&files.path("other.toml")).unwrap();
    for before in [&config, &other] {
        files.apply(&config);
        let again = before.with_policy_file(&given).unwrap();
        let loaded = again.load_policies().unwrap();
        keep(&kept, &said, &again, || loaded.deny_files()).unwrap();
        assert!(!kept.exists());
    }
    // The link is what is named, wherever it leads.
    fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(files.path("other.toml"), &link).unwrap();
    let again = config.with_policy_file(&files.path("other.toml")).unwrap();
    assert_eq!(again.policy_name(), link.display().to_string());
    assert!(again.base_file.unwrap().text().contains("list.txt"));
}

#[test]
fn what_the_command_line_names_is_not_kept() {
    let files = Files::new();
    let given = files.path("given.toml");
    let config = config(&given, &[]);
    files.apply(&config);
    assert!(files.path("kept").exists());
    let loaded = config.load_policies().unwrap();
    let said = config.policy_flags();
    keep(&files.path("kept"), &said, &config, || loaded.deny_files()).unwrap();
    assert!(!files.path("kept").exists());
}
