"use strict";

// Shows openapi.json: every operation, the fields of its body, and its answers. Nothing is loaded from elsewhere.

const METHODS = ["get", "post", "put", "delete"];

function element(tag, text, ...children) {
  const node = document.createElement(tag);
  if (text !== null) node.textContent = text;
  node.append(...children);
  return node;
}

function resolved(api, schema) {
  const name = schema?.$ref?.split("/").pop();
  return name ? api.components.schemas[name] : schema;
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((v) => JSON.stringify(v)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const several = schema.anyOf || schema.oneOf;
  if (several) return several.map(typeOf).join(" | ");
  if (schema.type === "array") return `${typeOf(schema.items || {})}[]`;
  return schema.type || "any";
}

function fields(schema) {
  const rows = Object.entries(schema.properties || {}).map(([name, field]) => {
    const isRequired = (schema.required || []).includes(name);
    const cells = [name, typeOf(field), isRequired ? "required" : JSON.stringify(field.default ?? null)];
    return element("tr", null, ...cells.map((text) => element("td", text)));
  });
  const heads = ["field", "type", "default"].map((text) => element("th", text));
  return element("table", null, element("tr", null, ...heads), ...rows);
}

function operation(api, path, method, about) {
  const shown = element("details", null, element("summary", `${method.toUpperCase()} ${path}`));
  if (about.description) shown.append(element("p", about.description));
  const body = resolved(api, about.requestBody?.content["application/json"]?.schema);
  if (body?.properties) shown.append(fields(body));
  for (const parameter of about.parameters || []) {
    shown.append(element("p", `${parameter.in}: ${parameter.name} (${typeOf(parameter.schema || {})})`));
  }
  const answers = Object.entries(about.responses || {}).map(([status, answer]) => {
    const schema = answer.content?.["application/json"]?.schema;
    return `${status}${schema ? ` ${typeOf(schema)}` : ""}`;
  });
  shown.append(element("p", `Answers: ${answers.join(", ")}`));
  return shown;
}

async function show() {
  const status = document.getElementById("status"), list = document.getElementById("operations");
  try {
    const answer = await fetch("openapi.json");
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    const api = await answer.json();
    for (const [path, methods] of Object.entries(api.paths)) {
      for (const method of METHODS.filter((m) => m in methods)) {
        list.append(operation(api, path, method, methods[method]));
      }
    }
    status.textContent = `${api.info.description} ${list.children.length} operations.`;
  } catch (error) {
    status.textContent = `openapi.json could not be read: ${error.message}`;
  }
}

show();
