// Sphinx's scores of search results, with pages for users before decision records.
var Scorer = {
  score: ([page, , , , score]) => {
    const first = { tutorial: 20, "how-to": 20, reference: 10, explanation: 5, decisions: -20 };
    return score + (first[page.split("/")[0]] ?? 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
