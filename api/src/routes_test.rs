use super::*;

#[test]
fn paths_have_one_parameter_at_most() {
    assert_eq!(matches("/v1/vms", "/v1/vms"), Some(""));
    assert_eq!(matches("/v1/vms/{name}", "/v1/vms/a"), Some("a"));
    assert_eq!(
        matches("/v1/vms/{name}/why", "/v1/vms/a.b/why"),
        Some("a.b")
    );
    for other in ["/v1/vms/", "/v1/vms/a/b", "/v1/vms//why", "/v1/vm", ""] {
        assert_eq!(matches("/v1/vms/{name}", other), None, "{other}");
    }
}

#[test]
fn a_wrong_method_is_told_from_a_wrong_path() {
    let problem = route(&Method::POST, "/v1/vms/a").unwrap_err();
    assert_eq!(problem.status, 405);
    assert!(
        problem.detail.contains("GET, PUT, PATCH, DELETE"),
        "{}",
        problem.detail
    );
    assert_eq!(route(&Method::GET, "/v2/vms").unwrap_err().status, 404);
}

#[test]
fn every_route_is_found_by_its_own_path() {
    for wanted in ROUTES {
        let path = wanted.path.replace("{name}", "x").replace("{id}", "x");
        let method = Method::from_bytes(wanted.method.as_bytes()).unwrap();
        let (found, parameter) = route(&method, &path).unwrap();
        assert_eq!(found.action, wanted.action, "{path}");
        assert_eq!(parameter == "x", wanted.path.contains('{'));
        assert_eq!(wanted.changes, wanted.method != "GET", "{path}");
    }
}
