use std::fs;

use super::*;

#[test]
fn what_the_jail_lacks_is_said_with_a_remedy() {
    let settings = tempfile::tempdir().unwrap();
    let path = settings.path();
    assert_eq!(of(true, true, true, path).state, State::Ok);
    let none = of(false, false, false, path);
    assert_eq!(none.state, State::Note);
    assert!(none.found.contains("no namespaces"), "{none:?}");

    fs::create_dir(path.join("kernel")).unwrap();
    let restricted = path.join("kernel/apparmor_restrict_unprivileged_userns");
    fs::write(restricted, "1\n").unwrap();
    // It can be made then, but not used.
    let of_user = of(true, false, false, path);
    assert_eq!(of_user.state, State::Note);
    assert!(of_user.remedy.unwrap().contains("AppArmor"));
    assert_eq!(of(true, true, true, path).state, State::Ok);

    fs::create_dir(path.join("user")).unwrap();
    fs::write(path.join("user/max_user_namespaces"), "0\n").unwrap();
    let of_root = of(false, true, true, path);
    assert!(of_root.found.contains("all namespaces but"), "{of_root:?}");
    assert!(of_root.remedy.unwrap().contains("user.max_user_namespaces"));
}
